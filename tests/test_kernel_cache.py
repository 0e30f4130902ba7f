"""What is cached of compiled kernels is what its name promises, no matter which process wrote it or when."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rowhaul
from rowhaul._kernels import kernel

PACKAGE = Path(rowhaul.__file__).parent
PROGRAM = "from rowhaul.data.answer import answer; print(answer(), answer.stats.cache_hits)"


@pytest.fixture
def copy(tmp_path):
    """A copy of the package with a kernel of one file that uses a constant of another."""
    copy = tmp_path / "rowhaul"
    (copy / "data").mkdir(parents=True)
    for name in ("__init__.py", "_kernels.py", "_lazy.py"):
        (copy / name).write_text((PACKAGE / name).read_text())
    (copy / "data" / "__init__.py").touch()
    (copy / "data" / "constant.py").write_text("CONSTANT = 41\n")
    (copy / "data" / "answer.py").write_text(
        "from rowhaul._kernels import kernel\nfrom rowhaul.data.constant import (\n    CONSTANT,\n)\n\n\n"
        "@kernel\ndef answer():\n    return CONSTANT\n"
    )
    return copy


def run(copy, program=PROGRAM):
    """What the kernel answers in a new process, and whether it was compiled there."""
    folder = copy.parent
    environment = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=200,
    )
    return done.stdout.split()[0], "Counter()" in done.stdout


def test_a_cached_kernel_is_compiled_anew_when_what_it_takes_in_changes(copy):
    assert run(copy) == ("41", True)
    assert run(copy) == ("41", False)
    (copy / "data" / "constant.py").write_text("CONSTANT = 42\n")
    assert run(copy) == ("42", True)
    assert run(copy) == ("42", False)
    assert len(list((copy.parent / "cache").rglob("*.nb*"))) == 1  # the old one is gone


@pytest.mark.slow
def test_a_process_that_began_before_a_change_leaves_nothing_wrong_behind(copy):
    """It has the old constant in memory, and finds the new one in the file."""
    change = (
        "import rowhaul._kernels, rowhaul.data.constant as c, pathlib, time; time.sleep(0.1); "
        "pathlib.Path(c.__file__).write_text('CONSTANT = 42\\n'); "
    )
    assert run(copy, change + PROGRAM) == ("41", True)
    assert run(copy) == ("42", True)
    assert run(copy) == ("42", False)


def test_signatures_that_are_saved_at_once_are_not_taken_for_each_other(tmp_path, monkeypatch):
    """Ranks begin together, each compiles what it needs first, and all of them save it."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def nothing():
        pass

    barrier, wrong = threading.Barrier(2), []
    files = [kernel(nothing)._cache for _ in range(2)]
    tmp_path.joinpath(files[0].cache_path).mkdir(exist_ok=True)

    def save(number):
        for round_ in range(150):
            keys = [f"{round_} of {writer}" for writer in range(2)]
            barrier.wait(30)
            files[number]._cache_file.save(keys[number], (keys[number], bytes(50_000)))
            barrier.wait(30)
            loaded = [files[number]._cache_file.load(key) for key in keys]
            wrong.extend(key for key, got in zip(keys, loaded, strict=True) if got and got[0] != key)

    other = threading.Thread(target=save, args=(1,))
    other.start()
    save(0)
    other.join(30)
    assert wrong == []


def test_processes_that_start_together_compile_a_kernel_once(copy):
    began = copy.parent / "began"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(began)!r}).exists(): time.sleep(0.01)\n"
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(run, copy, f"import rowhaul.data.answer\n{wait}{PROGRAM}") for _ in range(3)]
        began.touch()
        answers = [one.result() for one in runs]
    assert [answer for answer, _ in answers] == ["41"] * 3
    assert sum(compiled for _, compiled in answers) == 1
