"""`prepare` beside pyarrow's CSV reader and Parquet writer on one Criteo-format log, and its peak memory.

    python benchmarks/prepare.py [--rows 500000] [--repeats 5] [--no-memory]

Goals: at most twice pyarrow's time, though `prepare` also checks every value, turns tokens into keys,
syncs its files and splits off a test set; a log 20 times larger within 10 % of the peak memory.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from report import console, interleaved_medians, print_machine, print_table
from rowhaul.data.preparing import prepare

COUNTS = [f"I{number}" for number in range(1, 14)]
TOKENS = [f"C{number}" for number in range(1, 27)]
# Distinct tokens per column, as in the Kaggle log but for the largest, which are cut to 2 million.
CARDINALITIES = (
    *(1460, 583, 2_000_000, 800_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 2_000_000, 3194),
    *(27, 14_992, 1_800_000, 10, 5652, 2173, 4, 1_900_000, 18, 15, 286_181, 105, 142_572),
)
HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
TIMES_LARGER = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the peak memory, which takes longer"
    )
    arguments = parser.parse_args()
    print_machine("pyarrow")
    folder = Path(tempfile.mkdtemp(prefix="rowhaul-bench-"))
    try:
        log = folder / "train.txt"
        write_log(log, arguments.rows)
        console.print(f"{arguments.rows:,} rows, {log.stat().st_size / 1e6:,.0f} MB of text")
        compare_times(log, folder, arguments.repeats)
        if not arguments.no_memory:
            compare_memory(log, folder)
    finally:
        shutil.rmtree(folder)


def compare_times(log: Path, folder: Path, repeats: int) -> None:
    peer, ours = folder / "pyarrow.parquet", folder / "rowhaul"
    medians = interleaved_medians(
        {
            "pyarrow csv + ParquetWriter": lambda repeat: with_pyarrow(log, peer),
            "rowhaul prepare": lambda repeat: _ignore(prepare(log, ours, "criteo", overwrite=True)),
        },
        repeats,
        warmup=1,
    )
    sizes = [peer.stat().st_size, sum(path.stat().st_size for path in ours.rglob("*.parquet"))]
    text, base = log.stat().st_size, medians["pyarrow csv + ParquetWriter"]
    rows = [
        [name, seconds, text / seconds / 1e6, size / 1e6, f"{seconds / base:.2f}x"]
        for (name, seconds), size in zip(medians.items(), sizes, strict=True)
    ]
    print_table("Text to Parquet", ["", "median s", "MB text/s", "MB Parquet", "time"], rows)


def compare_memory(log: Path, folder: Path) -> None:
    larger = folder / "larger.txt"
    with larger.open("wb") as target:
        for _ in range(TIMES_LARGER):
            with log.open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 24)
    peaks = [peak_bytes(path, folder / f"memory-{path.stem}") for path in (log, larger)]
    rows = [
        [name, peak / 1e6, f"{peak / peaks[0]:.3f}x"]
        for name, peak in zip(("1x the rows", f"{TIMES_LARGER}x the rows"), peaks, strict=True)
    ]
    print_table("Peak memory of a fresh process", ["", "MB", ""], rows)


PREPARE_AND_SHOW_PEAK = """
import sys
from rowhaul.cli import main
sys.argv = ["rowhaul", "prepare", "--format", "criteo", sys.argv[1], "--out", sys.argv[2]]
try:
    main()
except SystemExit as end:
    assert not end.code
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_bytes(log: Path, out: Path) -> int:
    """The process's own high-water mark; getrusage would count this one's, which started it, too."""
    command = [sys.executable, "-c", PREPARE_AND_SHOW_PEAK, str(log), str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(out)
    return int(done.stdout.split()[-1]) * 1024


def with_pyarrow(log: Path, out: Path) -> None:
    """The obvious few lines: types given, everything else as it comes."""
    types = {"label": pa.int8(), **dict.fromkeys(COUNTS, pa.int64()), **dict.fromkeys(TOKENS, pa.string())}
    reader = csv.open_csv(
        log,
        read_options=csv.ReadOptions(column_names=list(types)),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=types),
    )
    with pq.ParquetWriter(out, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


def write_log(path: Path, num_rows: int, seed: int = 0) -> None:
    """Rows in the Kaggle format with skewed counts and tokens, some of them missing."""
    rng = np.random.default_rng(seed)
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with path.open("wb") as file:
        for start in range(0, num_rows, 100_000):
            rows = min(100_000, num_rows - start)
            columns = [pa.array((rng.random(rows) < 0.25).astype(np.int8))]
            for _ in COUNTS:
                counts = np.floor(rng.lognormal(1.5, 1.8, rows)).astype(np.int32)
                columns.append(pa.array(counts, mask=rng.random(rows) < 0.15))
            for number, cardinality in enumerate(CARDINALITIES):
                rank = np.minimum(cardinality ** rng.random(rows), cardinality - 1).astype(np.uint64)
                tokens = hex_strings((rank * np.uint64(2_654_435_761) + np.uint64(number)).astype(np.uint32))
                missing = pa.array(rng.random(rows) < 0.05)
                columns.append(pc.if_else(missing, pa.scalar(None, pa.string()), tokens))
            csv.write_csv(pa.table(columns, names=["label", *COUNTS, *TOKENS]), file, options)


def hex_strings(numbers: np.ndarray) -> pa.Array:
    """Eight hexadecimal digits each."""
    digits = HEX_DIGITS[(numbers[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & 15]
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * 8
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits))]
    return pa.Array.from_buffers(pa.string(), len(numbers), buffers)


def _ignore(result: object) -> None:
    """Make an expression a statement."""


if __name__ == "__main__":
    main()
