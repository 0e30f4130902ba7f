"""Without calls that only Linux has, one process trains, scores and simulates; a cluster is refused."""

import subprocess
import sys

import pytest

# Other packages are imported first: only our own code shall believe that it is on a Mac.
PRELUDE = """
import builtins, mmap, os, pathlib, signal, socket, sys
import fsspec.implementations.local, matplotlib.pyplot, numba, psutil, pyarrow.parquet, tensorboard, torch
import torch.distributed, torch.utils.tensorboard

for module, names in {
    os: "memfd_create eventfd eventfd_read eventfd_write sched_getaffinity sched_setaffinity pidfd_open "
        "MFD_CLOEXEC MFD_ALLOW_SEALING EFD_CLOEXEC EFD_NONBLOCK posix_fadvise",
    socket: "SO_PEERCRED MSG_CMSG_CLOEXEC MSG_NOSIGNAL SOCK_CLOEXEC TCP_USER_TIMEOUT TCP_KEEPIDLE",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MAP_POPULATE",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

real_bind = socket.socket.bind
def bind(self, address):
    assert not str(address).startswith("\\0"), "an abstract socket"
    return real_bind(self, address)
socket.socket.bind = bind

real_open = builtins.open
def opened(file, *arguments, **options):
    if str(file).startswith("/proc") and sys._getframe(1).f_globals.get("__name__", "").startswith("rowhaul"):
        raise FileNotFoundError(2, "no /proc here", str(file))
    return real_open(file, *arguments, **options)
builtins.open = opened
sys.platform = "darwin"

from rowhaul.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = line.split()
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code or 0, ":", line, flush=True)
"""


def run_elsewhere(lines, folder):
    return subprocess.run(
        [sys.executable, "-c", PRELUDE],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=570,
        cwd=folder,
        check=False,
    )


@pytest.mark.slow
def test_one_process_needs_nothing_of_linux(tmp_path):
    lines = [
        "rowhaul demo --rows 4000",
        "rowhaul predict demo-run/run --data demo-run/logs/test --out scores.parquet",
        "rowhaul simulate demo-run/logs --workers 2 --links 1gbit*2 --iterations 12",
    ]
    done = run_elsewhere(lines, tmp_path)
    assert [line for line in done.stdout.splitlines() if line.startswith("ended with")] == [
        f"ended with 0 : {line}" for line in lines
    ], done.stdout + done.stderr
    assert (tmp_path / "scores.parquet").exists()


def test_several_ranks_say_that_they_need_linux(monkeypatch):
    from rowhaul.cluster import join, launch
    from rowhaul.errors import ClusterError

    monkeypatch.setattr(sys, "platform", "darwin")
    for start in (lambda: launch(["train"], num_workers=2), join):
        with pytest.raises(ClusterError, match=r"needs Linux, and this is darwin; .*one process.*simulate"):
            start()
