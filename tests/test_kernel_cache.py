import os
import subprocess
import sys
from pathlib import Path

import rowhaul

PACKAGE = Path(rowhaul.__file__).parent
PROGRAM = "from rowhaul.data.answer import answer; print(answer(), answer.stats.cache_hits)"


def test_a_cached_kernel_is_compiled_anew_when_what_it_takes_in_changes(tmp_path):
    """In a copy of the package: a kernel of one file that uses a constant of another."""
    copy = tmp_path / "rowhaul"
    (copy / "data").mkdir(parents=True)
    for name in ("__init__.py", "_kernels.py"):
        (copy / name).write_text((PACKAGE / name).read_text())
    (copy / "data" / "__init__.py").touch()
    constant = copy / "data" / "constant.py"
    (copy / "data" / "answer.py").write_text(
        "from rowhaul._kernels import kernel\nfrom rowhaul.data.constant import (\n    CONSTANT,\n)\n\n\n"
        "@kernel\ndef answer():\n    return CONSTANT\n"
    )

    def run():
        command = [sys.executable, "-c", PROGRAM]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, timeout=60
        )
        return done.stdout.split()[0], "Counter()" in done.stdout

    constant.write_text("CONSTANT = 41\n")
    assert run() == ("41", True)
    assert run() == ("41", False)
    constant.write_text("CONSTANT = 42\n")
    assert run() == ("42", True)
