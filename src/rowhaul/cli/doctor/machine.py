"""Checks of this machine and this installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rowhaul import __version__
from rowhaul._cores import usable_cores

GIB = 1 << 30
LOW_MEMORY_BYTES = 2 * GIB
LOW_DISK_BYTES = 1 * GIB
LOW_SHARED_MEMORY_BYTES = GIB // 2  # containers often get 64 MiB

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding; ``fix`` is what to type when the status is not "ok"."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def check_python(needed: str | None = None) -> Check:
    """Whether the package supports this Python."""
    needed = needed or _declared()[0]
    detail = f"{platform.python_version()} at {sys.executable}"
    if _satisfies(platform.python_version(), needed):
        return Check("Python", "ok", detail)
    fix = "install a newer Python, e.g. `uv python install 3.12`"
    return Check("Python", "fail", f"{detail}; {needed} is needed", fix)


def check_packages(requirements: Iterable[str] | None = None) -> Check:
    """Whether every required package is installed and new enough."""
    if requirements is None:
        requirements = _declared()[1]
    found, wrong = [f"rowhaul {__version__}"], []
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        needed = requirement.removeprefix(name).partition(";")[0].strip()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing ({needed or 'any version'} is needed)")
            continue
        found.append(f"{name} {version}")
        if not _satisfies(version, needed):
            wrong.append(f"{name} is {version}, {needed.strip()} is needed")
    if wrong:
        return Check("packages", "fail", "; ".join(wrong), "run `pip install --upgrade rowhaul`")
    return Check("packages", "ok", ", ".join(found))


def _declared() -> tuple[str, list[str]]:
    """The Python and the packages that the installation, or an uninstalled source tree, requires."""
    try:
        facts = importlib.metadata.metadata("rowhaul")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).parents[4] / "pyproject.toml"
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        return declared["requires-python"], declared["dependencies"]
    packages = facts.get_all("Requires-Dist") or []
    return facts["Requires-Python"], [one for one in packages if "extra ==" not in one]


def check_cpu() -> Check:
    """The processor, the cores this process may use and the threads torch will take."""
    import torch

    cores = usable_cores()
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"{_cpu_model()}, {capability}; {cores} cores usable, {threads} torch threads"
    if threads > cores:
        fix = f"run `export OMP_NUM_THREADS={cores}`"
        return Check("CPU", "warn", f"{detail}: they will compete for cores", fix)
    return Check("CPU", "ok", detail)


def check_gpu() -> Check:
    """Which GPUs torch can use; having none is fine."""
    import torch

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus:
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(num_gpus))
        if importlib.util.find_spec("triton") is None:
            fix = "run `pip install 'rowhaul[gpu]'`; without it rows stay in host memory, which is slower"
            return Check("GPU", "warn", f"{names}; Triton is not installed", fix)
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            fix = "run `apt install gcc libc6-dev`, or set CC; Triton compiles its launchers at first use"
            return Check("GPU", "warn", f"{names}; no C compiler for Triton", fix)
        return Check(
            "GPU",
            "ok",
            f"{names}; Triton {importlib.metadata.version('triton')}: --device cuda keeps rows there",
        )
    if complaints:
        fix = "run `nvidia-smi` to see the driver's state"
        return Check("GPU", "warn", f"not usable: {complaints[0].message}", fix)
    return Check("GPU", "ok", "none; training runs on the CPU")


def check_memory() -> Check:
    """How much memory is available for rows and batches."""
    import psutil

    memory = psutil.virtual_memory()
    limit = container_memory_limit() or memory.total
    total, available = min(memory.total, limit), min(memory.available, limit)
    detail = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if available < LOW_MEMORY_BYTES:
        return Check("memory", "warn", detail, "free some; `ps aux --sort=-rss | head` shows what holds it")
    return Check("memory", "ok", detail)


def check_folder(folder: Path) -> Check:
    """Whether a run can be written to ``folder``."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"rowhaul")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        fix = "`cd` to a folder you can write to, or pass --out"
        return Check("disk", "fail", f"{folder} cannot be written to: {error}", fix)
    detail = f"{folder} is writable, {free / GIB:.1f} GiB free"
    if free < LOW_DISK_BYTES:
        fix = "free some space, or pass --out on a larger disk; `df -h` lists them"
        return Check("disk", "warn", detail, fix)
    return Check("disk", "ok", detail)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Whether processes of one machine can share tensors of a useful size."""
    if not folder.is_dir():
        return Check("shared memory", "ok", f"no {folder} on this system")
    usage = shutil.disk_usage(folder)
    detail = f"{folder}: {usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < LOW_SHARED_MEMORY_BYTES:
        fix = "run `sudo mount -o remount,size=2G /dev/shm`; in a container start it with `--shm-size=2g`"
        return Check("shared memory", "warn", detail, fix)
    return Check("shared memory", "ok", detail)


def check_kernel_cache() -> Check:
    """Where numba will keep compiled kernels."""
    import numba

    fix = f"run `export NUMBA_CACHE_DIR={Path(tempfile.gettempdir()) / 'rowhaul-kernels'}`"
    try:
        chosen = numba.njit(_triangle, cache=True).stats.cache_path
    except RuntimeError as error:
        return Check("kernel cache", "warn", f"none: every start compiles all kernels again ({error})", fix)
    wanted = os.environ.get("NUMBA_CACHE_DIR")
    if wanted and not Path(chosen).resolve().is_relative_to(Path(wanted).resolve()):
        detail = f"NUMBA_CACHE_DIR={wanted} cannot be written to; {chosen} is used"
        return Check("kernel cache", "warn", detail, fix)
    return Check("kernel cache", "ok", str(chosen))


def check_kernel() -> Check:
    """Whether a kernel compiles and computes."""
    from rowhaul._kernels import kernel

    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cache that cannot be written has its own check
        result = kernel(_triangle)(10)
    seconds = time.perf_counter() - began
    if result != 45:
        fix = "run `pip install --force-reinstall numba llvmlite`"
        return Check("kernels", "fail", f"a compiled kernel returned {result} instead of 45", fix)
    return Check("kernels", "ok", f"compiled or loaded, and run, in {seconds:.2f} s")


def _triangle(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model.group(1).strip() if model else platform.machine()


def container_memory_limit() -> int | None:
    """The memory limit of this process's control group, if it has one (cgroup v2, then v1)."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


def _satisfies(version: str, needed: str) -> bool:
    """Whether ``version`` reaches ``>=`` and is none of ``!=N.*`` in ``needed``: no others are declared."""
    bound = re.search(r">=\s*([0-9.]+)", needed)
    refused = [_release(one) for one in re.findall(r"!=\s*([0-9.]+)\.\*", needed)]
    release = _release(version)
    reaches = bound is None or release >= _release(bound.group(1))
    return reaches and not any(release[: len(one)] == one for one in refused)


def _release(version: str) -> tuple[int, ...]:
    leading = re.split(r"[^0-9.]", version, maxsplit=1)[0]
    numbers = [int(number) for number in leading.split(".") if number]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
