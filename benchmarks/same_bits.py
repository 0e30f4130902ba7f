"""Train two revisions of the code on one machine and compare what they learn, bit for bit.

    python benchmarks/same_bits.py [REVISION_A [REVISION_B]] [--only TEXT] [--skip-pruned] [--read-old]

A revision is the path of a checkout, or anything git can name; that is checked out into a temporary folder
and compiles its kernels there. By default A is HEAD and B this work tree. Each trains all SETTINGS in one
process, on logs that A generates. Losses, metrics, dense weights, rows and all optimizer state must be the
same bits. With --read-old, A trains OLD_RUNS from its command line; A and B each evaluate and resume them.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

# Functions of this file and arguments, most of them settings of a configuration file; bars separate choices.
SETTINGS = """
alone model.name=dlrm|deepfm|dcn|wide_deep|ncf|legacy rows.name=sgd|adagrad|rowwise_adagrad|adam
alone model.name=dlrm|deepfm|dcn|wide_deep|ncf|legacy model.options.dropout=0.3 log=movielens
alone rows.name=sgd|adagrad|rowwise_adagrad|adam precision=float64 rows.options.weight_decay=0.01
alone rates.decay=constant|linear|cosine rates.warmup_steps=3 dense.name=SGD dense.lr=0.1
alone shuffle_rows=150 epochs=2 seed=7 eval_every=3 on_unknown=init|default
alone tables.default.admit_after=1|2 tables.default.ttl=2 eval_every=3
alone tables.default.max_rows=20 tables.default.evict=lru|lfu
alone stops=[4,9] rows.name=rowwise_adagrad|adam precision=float32|float64
alone stops=[4,9] tables.default.admit_after=2 tables.default.ttl=4 shuffle_rows=100
cluster cluster.workers=1|2|3|4 cluster.colocated=false|true cluster.peer_to_peer=false|true
cluster cluster.stores=2 rows.name=sgd|adagrad|rowwise_adagrad|adam precision=float32
cluster cluster.dispatcher=random|round-robin|laia|laia-adaptive:1:2|esd:0.5|esd:1|joint|two-batch:joint
cluster cluster.dispatcher=laia|esd:1|joint cluster.links=9mbit*2,2mbit log=taobao
cluster cluster.cache_policy=lru|lfu|emark|belady cluster.cache=2KiB
cluster cluster.sync=full|bounded:0|bounded:2
cluster cluster.hot_rows=6 cluster.sync=on-demand|full|static cluster.colocated=false|true segments=[5,null]
cluster cluster.shares=2,0,1 cluster.look_ahead=0|4 cluster.first_touch=false segments=[4,0,null]
cluster cluster.sync=on-demand|full tables.default.admit_after=2 tables.default.ttl=4 tables.movie.max_rows=9
alone prune.ratio=60% prune.two_dimensions=false|true prune.utility=gradient|access stops=[0]|[4,9]
cluster prune.ratio=60% prune.two_dimensions=false|true cluster.sync=on-demand|full dims=[4,4,4]
"""
OLD_RUNS = """
--model dlrm --row-optimizer adagrad --set rates.warmup_steps=4
--model ncf --row-optimizer adam --precision float64 --shuffle-rows 100 --admit-after 2 --ttl 5 --max-rows 60
--workers 2 --stores 1 --cache 400
--workers 2 --colocated --hot 10 --row-optimizer adam
--prune 60% --set prune.period=3 --set prune.cold_start=3
"""
LOGS = {
    "taobao": {"label": "clk", "dense": ["age_level"], "ids": ["user", "cate_id", "brand"]},
    "movielens": {"label": "liked", "ids": ["user", "movie", {"name": "zip", "table": "user"}, "genres"]},
}
# Where names may be, in any revision; all but the first two are modules of the tests.
MODULES = "rowhaul rowhaul.train in_process_cluster training_case exact_cases test_exact_pruning"
ROOT = Path(__file__).resolve().parents[1]
Found = dict[str, Any]  # tensors by name, rows by key, numbers as text


def named(name: str) -> Any:
    """Find a name in the first module that has it."""
    for module in MODULES.split():
        with suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"no {name} in any of {MODULES}")


def configured(given: dict[str, Any]) -> Any:
    """Make a `TrainConfig` from settings by dotted name; layers and batches are small."""
    nested: dict[str, Any] = {"batch_size": 40, "log_every": 1, "model": {"name": "dlrm", "embedding_dim": 4}}
    if "prune.ratio" in given:
        nested["prune"] = {"chunks": 2, "period": 3, "cold_start": 3}
    for name, value in given.items():
        *outer, last = name.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), outer, nested)[last] = value
    sizes = {"bottom": [8], "top": [8, 4]} if nested["model"]["name"] == "dlrm" else {"hidden": [8, 4]}
    nested["model"].setdefault("options", {}).update(sizes)
    return named("TrainConfig").from_dict(nested)


def alone(folder: Path, log: str = "taobao", stops: Any = (0,), **given: Any) -> Found:
    """Train in one process; save, evaluate and resume at every stop."""
    schema, held_out = named("Schema").from_dict(LOGS[log]), folder / log / "test"
    with tempfile.TemporaryDirectory() as out:
        run = Path(out, "run")
        for stop in stops:
            config = configured({**given, "max_steps": stop})
            named("train_run")(config, schema, folder / log, out=run, eval_data=held_out, resume=run.exists())
        return saved(run)


def saved(run: Path) -> Found:
    """Load what a run has logged and saved."""
    trainer, found = named("load_trained")(run), {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name in sorted({"loss", "auc", "log_loss"} & line.keys()):
            found[f"{name} of step {line['step']}"] = str(line[name])
    found |= dict(trainer.model.named_parameters())
    for number, state in trainer.dense.state_dict()["state"].items():
        found |= {f"{name} of dense weight {number}": value for name, value in state.items()}
    for table in trainer.collection.embedding_bag_configs():
        rows = found[f"rows of {table.name}"] = {}
        for keys, records in trainer.collection.rows(table.name):
            rows |= zip(keys.tolist(), records, strict=True)
    return found


def cluster(
    folder: Path, log: str = "movielens", segments: Any = (None,), dims: Any = (4, 3, 5), **given: Any
) -> Found:
    """Train the small model of the exact tests on a cluster in one process."""
    config = configured({"cluster.workers": 3, "cluster.cache": 90, "precision": "float64", **given})
    schema, dtype = named("Schema").from_dict(LOGS[log]), getattr(torch, config.precision)
    collection = named("Trainer")(config, schema).collection
    configs, rule = collection.embedding_bag_configs(), collection.optimizer
    tables = tuple(replace(one, embedding_dim=dim) for one, dim in zip(configs, dims, strict=True))
    batches = tuple(named("SampleStream")(folder / log, schema, 24))
    count = int(config.cluster.hot_rows)  # of the last table, and others of it after a segment
    keys = np.unique(np.concatenate([one.values[-one.lengths[-1].sum() :] for one in batches]))
    hot = [named("HotRows")(np.full(count, len(tables) - 1), keys[at : at + count]) for at in (0, count // 2)]
    first, later = (hot[0], tuple(hot[1 : len(segments)])) if count else (None, ())
    policies = config.row_policies([one.name for one in tables])
    sizes = named("row_sizes")(tables, rule, dtype)
    settings = config.cluster.schedule(config.cluster.topology(), sizes, hot=first, policies=policies)
    more: dict[str, Any] = {"segments": segments, "replicated": later}
    case = named("Case")(tables, rule, settings, batches, dtype, lambda step: 0.3 / (1 + step % 7), **more)
    kind = {"kind": named("PrunedRank")} if "prune.ratio" in given else {}
    case = named("as_pruned")(case, config.prune.settings()) if kind else case
    outcome = named("run_cluster")(case, **kind)
    found: Found = {f"loss {step}": str(loss) for step, loss in enumerate(outcome.losses, start=1)}
    found |= {f"dense weight {number}": one for number, one in enumerate(outcome.rests[0][-1].dense)}
    for (table, key), record in outcome.rows().items():
        found.setdefault(f"rows of table {table}", {})[key] = record
    return found


def read_old(folder: Path, old: Path, new: Path, flags: str) -> Found:
    """Evaluate and resume a run that the old code has trained."""
    run, data = tempfile.mkdtemp(dir=folder), folder / "taobao"
    train = f"-m rowhaul train --out {run} --data {data}"
    python(old, *f"{train} --batch-size 40 --max-steps 5 --threads 1 --set log_every=1 {flags}".split())
    metrics = python(new, *f"-m rowhaul evaluate {run} --data {data}/test --json".split())
    python(new, *f"{train} --resume --max-steps 10".split())
    known = {name: one for name, one in json.loads(metrics).items() if not name.startswith("unknown")}
    return {"metrics": known, **saved(Path(run))}


def digest(value: Any) -> str:
    """Hash a tensor with its type and shape, or rows in the order of their keys."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        keys = sorted(value)
        return digest(np.array(keys)) + digest(np.array([value[key] for key in keys]))
    array = np.ascontiguousarray(value.detach() if isinstance(value, torch.Tensor) else value)
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def work(folder: Path, old: Path, new: Path) -> None:
    """Train the settings that come in; print the digests of each as a line of JSON."""
    torch.set_num_threads(1)
    for setting in sys.stdin.read().splitlines():
        how, *given = setting.split()
        words = [word.partition("=") for word in given]
        try:
            if how in globals():
                found = globals()[how](folder, **{name: yaml.safe_load(value) for name, _, value in words})
            else:
                found = read_old(folder, old, new, setting)
            found = {name: digest(one) for name, one in found.items()}
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{getattr(error, 'stderr', '')}"
            found = {"error": text.strip().splitlines()[-1]}
        print(json.dumps([setting, found]), flush=True)


def python(checkout: Path, *command: Any, settings: str | None = None) -> str:
    """Run Python on a checkout and return what it prints; it may only fail if it works on settings."""
    paths = os.pathsep.join(str(checkout / one) for one in ("src", "tests/exact", "tests/pruning", "tests"))
    environment, check = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, settings is None
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if check else None, "input": settings}
    whole = [sys.executable, "-P", *map(str, command)]
    return subprocess.run(whole, env=environment, check=check, text=True, **pipes).stdout


def checkout(revision: str, folder: Path) -> Path:
    """Check out a revision, unless it is a checkout already."""
    if Path(revision, "src", "rowhaul").is_dir():
        return Path(revision).resolve()
    worktree = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*worktree, "add", "--quiet", "--detach", folder, revision], check=True)
    atexit.register(subprocess.run, [*worktree, "prune"])  # once the folder is gone
    return folder


def verdict(a: dict[str, str], b: dict[str, str]) -> str:
    """Say whether both sides learned the same."""
    different = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if "error" in {**a, **b}:
        return f"FAILS: A {a.get('error', 'trains')} | B {b.get('error', 'trains')}"
    if not different:
        return "equal"
    first = " | ".join(one.get(different[0], "nothing") for one in (a, b))
    return f"DIFFERS in {len(different)} of {len(a)} tensors, first {different[0]}: {first}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", nargs="?", default="HEAD", metavar="REVISION_A")
    parser.add_argument("b", nargs="?", default=str(ROOT), metavar="REVISION_B")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with TEXT in their line")
    parser.add_argument("--skip-pruned", action="store_true", help="leave out settings with pruned rows")
    parser.add_argument("--read-old", action="store_true", help="have B read what A wrote")
    options = parser.parse_args()
    every: list[str] = []
    for line in (OLD_RUNS if options.read_old else SETTINGS).strip().splitlines():
        words = [word.partition("=") for word in line.split()]
        choices = [[name + equals + value for value in values.split("|")] for name, equals, values in words]
        every += map(" ".join, product(*choices))
    settings = [one for one in every if options.only in one and not (options.skip_pruned and "prune" in one)]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary:
        folder, results = Path(temporary), []
        sides = [checkout(options.a, folder / "a"), checkout(options.b, folder / "b")]
        for log in LOGS:
            python(sides[0], *f"-m rowhaul generate --preset {log} --rows 600 --out {folder / log}".split())
        for side in sides:
            print(f"training with {side}", flush=True)
            lines = python(side, __file__, "--work", folder, sides[0], side, settings="\n".join(settings))
            results.append(dict(map(json.loads, lines.splitlines())))
    verdicts = [verdict(*(one.get(name, {"error": "did not run"}) for one in results)) for name in settings]
    print(*(f"{name:110} {found}" for name, found in zip(settings, verdicts, strict=True)), sep="\n")
    print(f"{verdicts.count('equal')} of {len(settings)} settings are equal")
    sys.exit(set(verdicts) != {"equal"})


if __name__ == "__main__":
    work(*map(Path, sys.argv[2:])) if sys.argv[1:2] == ["--work"] else main()
