"""What dispatchers cost beside LAIA on the head of a log: how often whole combinations of ids come back.

    python benchmarks/cooccurrence.py [--seeds 3]

The figures were measured once on the first 10,000 samples of the real Criteo Kaggle and Avazu logs, which are
not ours to pass on: 8 workers of 16 samples, 4 fast links and 4 ten times slower, dim 512, 8 % of the rows
cached, first touch off, 78 iterations of which the first 10 are left out. Here they stand beside the same
measurement on generated logs.
"""

from __future__ import annotations

import argparse

import numpy as np

from figures.lab import LAIA, Lab, Mechanism, Setting
from figures.traces import generated

SAMPLES = 10_000
DISPATCHERS = ("random", "esd:1", "joint")
REAL = {"criteo": (1.30, 0.80, 0.70), "avazu": (1.23, 0.88, 0.53)}
SETTING = Setting((5.0,) * 4 + (0.5,) * 4, per_worker=16, dim=512, cache=0.08)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    print(f"{'cost relative to LAIA':24}" + "".join(f"{name:>9}" for name in DISPATCHERS))
    for preset, real in REAL.items():
        show(f"{preset}, real", real)
        each = [ratios(preset, seed) for seed in seeds]
        for seed, found in zip(seeds, each, strict=True):
            show(f"{preset}, seed {seed}", found)
        show(f"{preset}, mean", tuple(np.mean(each, axis=0)))


def ratios(preset: str, seed: int = 0) -> tuple[float, ...]:
    """The cost of every dispatcher, relative to LAIA's."""
    lab, trace = Lab(compute_seconds=0.0), generated(preset, SAMPLES, seed)
    base = lab.run(trace, LAIA, SETTING).cost_seconds
    return tuple(lab.run(trace, Mechanism(name, name), SETTING).cost_seconds / base for name in DISPATCHERS)


def show(name: str, numbers: tuple[float, ...]) -> None:
    print(f"{name:24}" + "".join(f"{number:9.3f}" for number in numbers))


if __name__ == "__main__":
    main()
