"""What `train`, `verify` and `size` share: options, reading the configuration, launching ranks."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rowhaul.cli.checks import feature_names
from rowhaul.cli.console import say
from rowhaul.cli.progress import EXIT_INTERRUPTED
from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from rowhaul.data.schema import Schema
    from rowhaul.train import TrainConfig

TOPOLOGIES = ("stores", "colocated")

CONFIG = typer.Argument(None, help="YAML or TOML settings; none are needed for the defaults.")
DATA = typer.Option(..., "--data", help="Parquet files, a folder or a glob; repeatable.")
RESUMABLE_DATA = typer.Option(
    [],
    "--data",
    help="Parquet files, a folder or a glob; repeatable. Or a stream: a folder with --follow, - for lines of "
    "JSON, redis://host/stream. A resumed run knows them.",
)
SCHEMA = typer.Option(None, "--schema", help="Schema file; default: schema.yaml beside the data.")
FEATURES = typer.Option(None, "--features", help="Id columns, comma-separated, of data without a schema.")
LABEL = typer.Option(None, "--label", help="Label column of data without a schema.")
SET = typer.Option(
    [], "--set", metavar="NAME=VALUE", help="Any other setting, e.g. --set model.options.dropout=0.1"
)

# Flags that stand for a setting of the configuration file, by the panel of the help that shows them.
_FLAGS_BY_PANEL: dict[str, dict[str, tuple[str, Any, str]]] = {
    "Model and training": {
        "model": (
            "model.name",
            str,
            "wide_deep, deepfm, dcn, dcnv2, finalmlp, dlrm, ncf, legacy, mmoe, ple, esmm, din, sasrec or "
            "two_tower.",
        ),
        "embedding_dim": ("model.embedding_dim", int, "Values in an embedding."),
        "row_optimizer": ("rows.name", str, "sgd, adagrad, rowwise_adagrad or adam."),
        "row_lr": ("rows.lr", float, "Learning rate of the rows."),
        "dense_optimizer": ("dense.name", str, "Any class of torch.optim."),
        "dense_lr": ("dense.lr", float, "Learning rate of the dense weights."),
        "batch_size": ("batch_size", int, "Samples in the global batch."),
        "epochs": ("epochs", int, "Passes over the data."),
        "shuffle_rows": ("shuffle_rows", int, "Samples in the shuffling window; 0: files' order."),
        "max_steps": ("max_steps", int, "Stop after this many steps; 0: the end of the data."),
        "seed": ("seed", int, "Seed of rows, dense weights, dropout and shuffling."),
        "precision": ("precision", str, "float32 or float64."),
        "row_dtype": (
            "row_dtype",
            str,
            "What rows are stored and sent in: auto, float32, bfloat16, float16 or int8.",
        ),
        "eval_every": ("eval_every", int, "Steps between evaluations; 0: only at the end."),
        "checkpoint_every": ("checkpoint_every", str, "Steps or time (15min, 2h); 0: at the end only."),
        "checkpoints": (
            "checkpoints",
            str,
            "Where checkpoints go: a folder, or a URL such as s3://bucket/run.",
        ),
        "threads": ("threads", int, "PyTorch threads; 0: PyTorch's choice."),
        "device": ("device", str, "Where the model and its rows are: cpu, or cuda."),
        "device_memory": (
            "device_memory",
            str,
            "What rows may take on the card, such as 8GiB, the others in host memory; 0: all are there.",
        ),
    },
    "Cluster": {
        "workers": ("cluster.workers", int, "Ranks that train; under torchrun: all but the stores."),
        "stores": ("cluster.stores", int, "Ranks that only hold rows."),
        "colocated": ("cluster.colocated", bool, "Workers store the rows themselves."),
        "topology": ("cluster.colocated", str, "stores, or colocated: the same as --colocated."),
        "peer_to_peer": ("cluster.peer_to_peer", bool, "Workers send rows to each other."),
        "dispatcher": ("cluster.dispatcher", str, "Who trains what: auto, joint, esd:1, laia, ..."),
        "sync": ("cluster.sync", str, "auto, on-demand, full, static, at-home or bounded:S (not exact)."),
        "cache": ("cluster.cache", str, "A worker's cache: rows, or bytes such as 512MiB."),
        "shares": ("cluster.shares", str, "equal, auto (by links and speed) or weights: 2,1,1"),
        "links": ("cluster.links", str, "equal, measure, or speeds: 50mbit*4,5mbit*4"),
        "look_ahead": ("cluster.look_ahead", int, "Batches known beyond the one being planned."),
        "data_from": ("cluster.data_from", str, "every_host, or rank0: read once and sent out."),
        "hot": ("cluster.hot_rows", str, "Rows replicated on every worker: auto, or how many."),
        "dense_wire": (
            "cluster.dense_wire",
            str,
            "How dense gradients travel: float32, or bfloat16 (not exact).",
        ),
        "share_device": ("cluster.share_device", bool, "Allow several workers on one card."),
        "secret_file": ("cluster.secret_file", str, "File with the secret that all ranks must prove."),
    },
    "Streams": {
        "follow": ("stream.follow", bool, "Go on with files that appear in the folder --data."),
        "max_wait": ("stream.max_wait", str, "Cut a batch that has waited so long (5s); not repeatable."),
        "stop_when_idle": ("stream.stop_when_idle", str, "End when nothing has come for so long (10s)."),
    },
    "Publishing": {
        "publish": ("publish.to", str, "Folder for servers: the model now, then what changes."),
        "publish_every": ("publish.every", str, "Steps or time between versions (5s, 1min)."),
        "publish_dense": ("publish.dense", str, "Graph of the dense part: onnx, pt2, or both (onnx,pt2)."),
    },
    "Rows": {
        "admit_after": ("tables.default.admit_after", int, "Admit a row at its N-th sighting."),
        "ttl": (
            "tables.default.ttl",
            str,
            "Forget rows not named for N steps, or 30d of event time (streams: or of wall time).",
        ),
        "max_rows": ("tables.default.max_rows", int, "Most rows of a table; see --evict."),
        "evict": ("tables.default.evict", str, "Which rows a full table forgets: lru or lfu."),
        "prune": ("prune.ratio", str, "Share of the rows' values to prune, such as 90%."),
        "memory_budget": ("prune.budget", str, "Or the memory for all rows, such as 2GiB."),
    },
}
FLAGS = {name: flag for flags in _FLAGS_BY_PANEL.values() for name, flag in flags.items()}


@dataclass(frozen=True)
class RunOptions:
    """The configuration file, the data, and the settings given on the command line."""

    config: Path | None
    data: list[str]
    schema: Path | None
    features: str | None
    label: str | None
    settings: list[str]  # --set
    flags: dict[str, Any]  # those that were given

    def read_config(
        self, resumed: dict[str, Any] | None = None, *, publishes: bool = False, **defaults: Any
    ) -> TrainConfig:
        """Read the configuration file (or take the resumed run's), then apply flags and ``--set``.

        ``defaults`` are values of flags that were not given. Only a run that is meant publishes: trials of
        its settings do not.
        """
        from dataclasses import replace

        from rowhaul.train.config import TrainConfig
        from rowhaul.train.publish_config import UNPUBLISHED

        config = TrainConfig.from_dict(self._given(resumed, **defaults))
        return config if publishes else replace(config, publish=UNPUBLISHED)

    def gives(self, name: str) -> bool:
        """Whether a setting such as ``model.embedding_dim`` is given, in whatever way."""
        found: Any = self._given()
        for part in name.split("."):
            if not isinstance(found, dict) or part not in found:
                return False
            found = found[part]
        return True

    def _given(self, resumed: dict[str, Any] | None = None, **defaults: Any) -> dict[str, Any]:
        """Return the settings given, as nested dictionaries."""
        import yaml

        from rowhaul._yaml import load_yaml
        from rowhaul.train.settings import override, read_settings

        given = read_settings(self.config) if self.config else deepcopy(resumed or {})
        flags = {**defaults, **self.flags}
        if resumed and str(flags.get("device", "")).startswith("cpu"):
            flags.setdefault("device_memory", "")  # of the card that the run is moved from
        flags |= topology_flag(flags.pop("topology", None), flags.get("colocated"))
        overrides = [(FLAGS[flag][0], value) for flag, value in flags.items()]
        for setting in self.settings:
            name, equals, text = setting.partition("=")
            if not equals:
                raise ConfigError(f"--set {setting}: expected NAME=VALUE, e.g. --set rates.decay=cosine")
            try:
                value = load_yaml(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"--set {setting}: the value is not YAML: {error}") from None
            overrides.append((name.strip(), value))
        for name, value in overrides:
            override(given, name, value)
        names = {name for name, _ in overrides}
        if resumed and not self.config and "prune.ratio" in names and "prune.budget" not in names:
            _forget_budget(given["prune"])  # it was made of the ratio, and will be put back
        return given

    def refuse_cluster_settings(self) -> None:
        """Refuse settings of a cluster where one process trains: they would change nothing.

        A configuration file may describe a cluster if ``--workers 0`` says not to use it.
        """
        from dataclasses import fields

        from rowhaul.train.cluster_config import ONE_PROCESS
        from rowhaul.train.config import TrainConfig

        given = {
            f"--{name.replace('_', '-')}": value
            for name, value in self.flags.items()
            if name in _FLAGS_BY_PANEL["Cluster"] and name != "workers"
        }
        for setting in self.settings:
            name, _, value = setting.partition("=")
            if name.strip().startswith("cluster.") and name.strip() != "cluster.workers":
                given[f"--set {name.strip()}"] = value
        if self.config is not None and not given and "workers" not in self.flags:
            cluster = TrainConfig.read(self.config).cluster
            for one in fields(cluster):
                if getattr(cluster, one.name) != getattr(ONE_PROCESS, one.name):
                    given[f"cluster.{one.name} in {self.config}"] = getattr(cluster, one.name)
        for what, value in given.items():
            raise ConfigError(
                f"{what} is {value!r}, but one process trains, without workers and stores, so it would be "
                "ignored; add --workers N (at least 1), leave it out, or give --workers 0 to train with a "
                "cluster's configuration file in one process"
            )

    def refuse_idle_flags(self, config: TrainConfig, reads_stream: bool) -> None:
        """Refuse flags that would change nothing, for want of what they are about.

        A configuration file may have their settings: it serves several commands.
        """
        limited = any(isinstance(one, dict) and one.get("max_rows") for one in config.tables.values())
        stream = (reads_stream, "a stream to read (--follow, --data - or a redis:// address)")
        publish = (config.publish.is_used, "a folder to publish to (--publish)")
        needs = {
            "max_wait": stream,
            "stop_when_idle": stream,
            "publish_every": publish,
            "publish_dense": publish,
            "evict": (limited, "a limit of rows (--max-rows)"),
        }
        for name, (is_there, needed) in needs.items():
            if name in self.flags and not is_there:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} does nothing without {needed}: give both, or leave it out")

    def find_schema(
        self,
        require_label: bool = True,
        saved: Schema | None = None,
        run: Path | None = None,
        follow: bool = False,
    ) -> Schema:
        """The schema given, or the one ``saved`` with the run to resume, or the one beside the data."""
        from rowhaul.data.files import find_schema, with_label
        from rowhaul.data.schema import SCHEMA_FILE
        from rowhaul.data.sources.opening import find_stream_schema, stream_of

        if saved is not None and not self.schema and self.features is None:
            is_here = run is not None and (run / SCHEMA_FILE).is_file()
            where = f"{run}/{SCHEMA_FILE}" if is_here else "the schema of the checkpoint"
            return with_label(saved, self.label, where)
        columns = feature_names(self.features) if self.features is not None else None
        given = stream_of(self.data, follow)
        if given is not None and not self.schema and not columns:
            return with_label(find_stream_schema(given), self.label, f"the {SCHEMA_FILE} of {given}")
        return find_schema(self.data, self.schema, columns, self.label, require_label=require_label)


def _forget_budget(prune: Any) -> None:
    """Remove the budget of a resumed run where there is a ratio again, for both cannot be kept."""
    from rowhaul.pruning.config import parse_share

    if isinstance(prune, dict) and parse_share(prune.get("ratio", "0")):
        prune["budget"] = "0"


def topology_flag(topology: str | None, colocated: bool | None) -> dict[str, Any]:
    """Translate ``--topology`` into the flag that it stands for."""
    if topology is None:
        return {}
    if topology not in TOPOLOGIES or (colocated and topology != "colocated"):
        beside = " beside --colocated" if colocated else ""
        raise ConfigError(f"--topology must be {' or '.join(TOPOLOGIES)}; got {topology!r}{beside}")
    return {"colocated": topology == "colocated"}


def with_run_options(command: Callable[..., None], data: Any = DATA) -> Callable[..., None]:
    """Add the options of a run to a command, which takes them as its first argument, a `RunOptions`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shared = [
        _parameter("config", Path | None, CONFIG),
        _parameter("data", list[str], data),
        _parameter("schema", Path | None, SCHEMA),
        _parameter("features", str | None, FEATURES),
        _parameter("label", str | None, LABEL),
        _parameter("settings", list[str], SET),
    ]
    flags = [
        _parameter(name, kind | None, _option(name, kind, help, panel))
        for panel, flags in _FLAGS_BY_PANEL.items()
        for name, (_, kind, help) in flags.items()
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        values = {name: given.pop(name) for name in FLAGS}
        flags = {name: value for name, value in values.items() if value is not None}
        options = RunOptions(**{one.name: given.pop(one.name) for one in shared}, flags=flags)
        command(options, **given)

    parameters = [*shared[:-1], *own, shared[-1], *flags]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapped


def _option(name: str, kind: Any, help: str, panel: str) -> Any:
    names = [f"--{name.replace('_', '-')}"] if kind is bool else []  # without a --no- form
    return typer.Option(None, *names, help=help, rich_help_panel=panel)


def _parameter(name: str, kind: Any, option: Any) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=kind)


def is_first_rank() -> bool:
    """Whether this process talks to the user: the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def launch_ranks(config: TrainConfig, schema: Schema, arguments: list[str] | None = None) -> None:
    """Run this command again as several processes, after compiling kernels once."""
    from rowhaul.cluster import launch
    from rowhaul.cluster.secret import load_secret
    from rowhaul.train.distributed.warm_up import compile_kernels

    cluster = config.cluster
    if cluster.secret_file:
        load_secret(cluster.secret_file)  # the launcher makes one of its own, but a bad file is a mistake
    compile_kernels(config, schema, lambda: say("compiling kernels, once; this takes a minute"))
    given = sys.argv[1:] if arguments is None else arguments
    try:
        launch(given, cluster.workers, cluster.stores, cluster.colocated, grace_seconds=cluster.grace)
    except KeyboardInterrupt as ending:
        if str(ending):  # otherwise rank 0 has said how it ended
            say(f"interrupted: {ending}; nothing was saved since the last checkpoint")
        raise typer.Exit(EXIT_INTERRUPTED) from None
