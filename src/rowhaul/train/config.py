"""The settings of a training run: frozen dataclasses, from a YAML or TOML file and overriding flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from rowhaul._field_types import check_fields
from rowhaul._files import write_text
from rowhaul._quantities import parse_bytes
from rowhaul.checkpoint import as_place
from rowhaul.errors import ConfigError
from rowhaul.monitoring.settings import UNMONITORED, MonitoringConfig
from rowhaul.nn.packed_rows import RowPrecision
from rowhaul.nn.row_source import RowSettings
from rowhaul.optim import RowOptimizerRule, row_optimizer
from rowhaul.pruning.config import UNPRUNED, PruneConfig, check_cluster
from rowhaul.schedule.lifetimes.policy import RowPolicy, check_policies, policies_by_table
from rowhaul.store.packing import PLAIN, check_row_dtype
from rowhaul.store.tables import ON_UNKNOWN
from rowhaul.train.checkpoint_pace import pace_of
from rowhaul.train.cluster_config import AT_HOME, ONE_PROCESS, ClusterConfig
from rowhaul.train.dense_state import options_for_device
from rowhaul.train.losses import PLAIN_LOSS, LossConfig
from rowhaul.train.progressive import AUTO_WINDOW, MOST_SAMPLES
from rowhaul.train.publish_config import UNPUBLISHED, PublishConfig
from rowhaul.train.ranking import check_metrics
from rowhaul.train.settings import migrated, read_settings, updated
from rowhaul.train.stream_config import NO_STREAM, StreamConfig

AUTO = "auto"
PRECISIONS = ("float32", "float64")
DECAYS = ("constant", "linear", "cosine")
_NOT_PUBLISHED = "leave out one of them, and export checkpoints (rowhaul export --dense)"
_LEAST = dict.fromkeys(("batch_size", "epochs", "keep_checkpoints", "log_every"), 1) | dict.fromkeys(
    ("shuffle_rows", "max_steps", "eval_every", "patience", "threads", "seed"), 0
)


def _check(holds: bool, name: str, needed: str, given: Any) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {needed}, got {given!r}")


def _check_choice(name: str, given: str, known: Sequence[str]) -> None:
    _check(given in known, name, f"one of {', '.join(known)}", given)


def _check_options(where: str, options: dict[str, Any], reserved: tuple[str, ...]) -> None:
    for name in options:
        if not isinstance(name, str) or name in reserved:
            raise ConfigError(f"{where}: {name!r} is not an option to set here")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and its own options by name (see docs/models.md)."""

    name: str = "dlrm"
    embedding_dim: int = 16
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        dim = self.embedding_dim
        _check(1 <= dim <= 1 << 16, "model.embedding_dim", "from 1 to 65536", dim)
        _check_options("model.options", self.options, reserved=())


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name with its learning rate and other settings."""

    name: str
    lr: float
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_options(f"options of {self.name}", self.options, reserved=("lr",))


@dataclass(frozen=True)
class RateSchedule:
    """Learning rates over time, for rows and dense weights alike: warm-up, then decay to the end."""

    warmup_steps: int = 0
    decay: str = "constant"

    def __post_init__(self) -> None:
        check_fields(self)
        _check(self.warmup_steps >= 0, "rates.warmup_steps", "at least 0", self.warmup_steps)
        _check_choice("rates.decay", self.decay, DECAYS)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a run, besides the data.

    Args:
        model: the model and its size.
        rows: the row optimizer: sgd, adagrad, rowwise_adagrad or adam.
        dense: the optimizer of the dense weights: any class of ``torch.optim``.
        rates: the learning-rate schedule.
        batch_size: samples in the global batch.
        epochs: passes over the data.
        shuffle_rows: samples in the shuffling window; 0 keeps the order of the files.
        max_steps: stop after this many steps; 0 means the end of the data.
        seed: of rows, dense weights, dropout and shuffling.
        precision: float32 or float64.
        row_dtype: what the values of rows are stored and sent in: float32, bfloat16, float16 or int8.
            auto: within a memory budget whose tail is shared what suits the ids where these are counted, and
            int8 where they are not; float32 otherwise.
        loss: how the losses of several labels, and weights of samples, become one. See `LossConfig`.
        metrics: what is measured within groups, where the schema names a group: gauc, mrr, ndcg@k, hr@k,
            mrr@k; by default gauc, ndcg@10, hr@10 and mrr.
        on_unknown: what keys that were never trained read as: init, default, error, or tail, which is what
            ids without a row of their own read. See `EmbeddingBagCollection`.
        eval_every: steps between evaluations; 0 evaluates only at the end.
        patience: end the run after so many evaluations in a row whose log loss (of several labels the sum, of
            numbers the RMSE) is not below the lowest before; 0: never. A label that no sample has counts for
            nothing.
        checkpoint_every: steps between checkpoints, or time, such as ``15min``; 0 saves only at the end.
        checkpoints: the folder or URL of checkpoints; by default a folder of the run.
        keep_checkpoints: how many of the newest checkpoints to keep.
        log_every: steps between lines in the log and in TensorBoard.
        progressive_window: samples that progressive validation measures together; 0: none. auto: none for
            files, 100,000 for streams. See `rowhaul.train.progressive`.
        threads: PyTorch threads; 0 leaves PyTorch's choice.
        device: where the model and its rows are: cpu, or a card such as cuda.
        device_memory: bytes of a card that rows may take, such as ``8GiB``: those used last are there, the
            others in host memory; by default, and with 0, all rows are on the card.
        tables: row policies by table, with ``default`` for all others. See `RowPolicy`.
        prune: which part of the rows to keep in memory; by default all.
        cluster: how the run is spread over ranks; by default one process.
        stream: how a stream is read, where the data is one.
        publish: where versions of the model are published for servers; by default nowhere.
        monitoring: how the run can be watched; by default by its log and TensorBoard only.
    """

    model: ModelConfig = ModelConfig()
    rows: OptimizerConfig = OptimizerConfig("rowwise_adagrad", 0.05)
    dense: OptimizerConfig = OptimizerConfig("Adam", 0.001)
    rates: RateSchedule = RateSchedule()
    batch_size: int = 2048
    epochs: int = 1
    shuffle_rows: int = 0
    max_steps: int = 0
    seed: int = 0
    precision: str = "float32"
    row_dtype: str = AUTO
    loss: LossConfig = PLAIN_LOSS
    metrics: list[str] = field(default_factory=list)
    on_unknown: str = "init"
    eval_every: int = 0
    patience: int = 0
    checkpoint_every: int | str = "15min"
    checkpoints: str = ""
    keep_checkpoints: int = 2
    log_every: int = 20
    progressive_window: int | str = AUTO
    threads: int = 0
    device: str = "cpu"
    device_memory: str = ""
    tables: dict[str, Any] = field(default_factory=dict)
    prune: PruneConfig = UNPRUNED
    cluster: ClusterConfig = ONE_PROCESS
    stream: StreamConfig = NO_STREAM
    publish: PublishConfig = UNPUBLISHED
    monitoring: MonitoringConfig = UNMONITORED

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in _LEAST.items():
            _check(getattr(self, name) >= least, name, f"at least {least}", getattr(self, name))
        _check(self.threads <= 1024, "threads", "at most 1024", self.threads)
        _check(self.seed < 2**63, "seed", "below 2**63", self.seed)
        _check_choice("precision", self.precision, PRECISIONS)
        self._check_row_dtype()
        check_metrics(self.metrics)
        if self.patience and not self.eval_every:
            raise ConfigError(
                f"patience is {self.patience}, but nothing is evaluated on the way: set eval_every"
            )
        _check_choice("on_unknown", self.on_unknown, ON_UNKNOWN)
        pace_of(self.checkpoint_every)  # or raises
        window = self.progressive_window
        is_window = window == AUTO or (isinstance(window, int) and 0 <= window <= MOST_SAMPLES)
        _check(is_window, "progressive_window", f"auto or 0 to {MOST_SAMPLES:,} samples", window)
        as_place(self.checkpoints)  # or raises
        check_policies(self.tables)
        keeps_all = all(one.keeps_all for one in policies_by_table(self.tables, list(self.tables)))
        self._check_device(keeps_all)
        if self.prune.is_used:
            if not keeps_all:
                raise ConfigError(
                    "prune decides itself which rows to drop, but tables have policies that do so, too; "
                    "leave out one of them"
                )
            if self.on_unknown == "error":
                raise ConfigError(
                    "on_unknown is error, but with prune ids never trained cannot be told from those whose "
                    "rows are not kept; set it to tail, which is what both read"
                )
            if self.cluster.workers:
                self._check_cluster()
        elif self.prune.tail == "initial" and keeps_all:
            raise ConfigError(
                "prune.tail is initial, but every id has a row: that is the tail of tables with policies; "
                "set tables.default.admit_after to the sightings before an id gets one, or leave it out"
            )
        if self.cluster.workers and self.cluster.sync == AT_HOME:
            self._check_at_home(keeps_all)
        if self.publish.is_used:
            self._check_published()
        if self.cluster.hot_is_auto and not keeps_all:
            raise ConfigError(
                "cluster.hot_rows is auto, but tables have policies, from which hot rows are exempt: what is "
                "learned would depend on measured times. Say how many rows are hot, or leave out the policies"
            )

    def _check_published(self) -> None:
        """Refuse rows whose changes cannot be published."""
        if self.prune.is_used:
            raise ConfigError(
                "publish does not go together with prune: which chunks and shared rows change is not "
                f"tracked; {_NOT_PUBLISHED}"
            )

    def check_alone(self) -> None:
        """Refuse what only ranks of a cluster can do, in a single process."""
        if self.publish.is_used and self.device != "cpu":
            raise ConfigError(
                f"publish does not go together with device {self.device} in one process yet: changes of rows "
                f"on a card are not tracked; {_NOT_PUBLISHED}"
            )

    def check_ranks(self) -> None:
        """Refuse what only one process has a use for, on ranks of a cluster."""
        if self.device_bytes:
            raise ConfigError(
                f"device_memory is {self.device_memory}: it bounds the rows of one process on its card. What "
                "a worker keeps on its card is its cache: set cluster.cache (--cache) instead"
            )

    def _check_device(self, keeps_all: bool) -> None:
        """Refuse what rows on a card cannot do yet."""
        kind, _, number = self.device.partition(":")
        known = kind in ("cpu", "cuda") and (not number or number.isdecimal())
        _check(known, "device", "cpu, or a card such as cuda or cuda:1", self.device)
        if self.device_bytes and kind != "cuda":
            raise ConfigError(
                f"device_memory is {self.device_memory}, but device is {self.device}: it bounds what rows "
                "take on a card; set device to cuda, or leave it out"
            )
        if self.cluster.workers:
            self.check_ranks()
        refused = {
            "tables": (
                self.device_bytes > 0 and not keeps_all,
                "with device_memory rows are admitted and dropped by nobody but the cache",
            ),
            "prune": (self.prune.is_used, "pruned rows are kept in host memory"),
            "row_dtype": (
                self.row_dtype not in (AUTO, PLAIN),
                "rows on a card are held in the precision of training",
            ),
        }
        for setting, (given, why) in refused.items():
            if kind == "cuda" and given:
                raise ConfigError(
                    f"device is {self.device}, which does not go together with {setting} yet: {why}; leave "
                    "out one of them"
                )

    def _check_cluster(self) -> None:
        """Refuse a cluster that pruning, or a budget, does not go together with."""
        if not self.prune.is_shared:
            check_cluster(self.cluster.sync, self.cluster.hot_rows)
            return
        from rowhaul.budget.layout import check_cluster as check_with_budget

        check_with_budget(self.cluster.sync, self.cluster.hot_rows)

    def _check_at_home(self, keeps_all: bool) -> None:
        """Refuse rows that cannot stay at home."""
        refused = {
            f"device is {self.device}": not self.device.startswith("cpu"),
            f"row_dtype is {self.row_dtype}": self.held_in != PLAIN,
            "tables have policies": not keeps_all,
        }
        for what, is_given in refused.items():
            if is_given:
                raise ConfigError(
                    f"cluster.sync is {AT_HOME}, for whole rows in host memory that nobody drops, but "
                    f"{what}: leave that out, or choose another sync, such as on-demand"
                )

    def _check_row_dtype(self) -> None:
        if self.row_dtype in (AUTO, PLAIN):
            return
        check_row_dtype(self.row_dtype, self.precision)
        if self.prune.is_used and not self.prune.is_shared:
            raise ConfigError(
                f"row_dtype is {self.row_dtype}, but pruned rows are kept in float32: their chunks come and "
                "go one by one; leave out prune, or set row_dtype to float32"
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> TrainConfig:
        """Build from nested dictionaries, as read from a file; unknown names are refused."""
        return updated(cls(), migrated(given))

    @classmethod
    def read(cls, path: str | Path) -> TrainConfig:
        """Read a ``.yaml``, ``.yml`` or ``.toml`` file."""
        return cls.from_dict(read_settings(path))

    def to_dict(self) -> dict[str, Any]:
        """All settings as nested plain values."""
        return asdict(self)

    def write(self, path: str | Path) -> None:
        """Write the YAML file that `read` reads."""
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False))

    def row_policies(self, tables: Sequence[str]) -> tuple[RowPolicy, ...]:
        """The policy of each of these tables."""
        return policies_by_table(self.tables, tables)

    @property
    def held_in(self) -> str:
        """The type that the values of rows are stored in."""
        if self.row_dtype != AUTO:
            return self.row_dtype
        # A single value needs a scale as large as itself; what is computed in float64 is wanted exact.
        suits = self.precision == "float32" and self.model.embedding_dim >= 2
        return "int8" if self.prune.is_shared and suits else PLAIN

    @property
    def device_bytes(self) -> int:
        """Bytes of a card that rows may take; 0: as many as they need."""
        return parse_bytes(self.device_memory, "device_memory") if self.device_memory else 0

    def scored_window(self, is_stream: bool) -> int:
        """Samples that progressive validation measures together; 0: none."""
        if self.progressive_window == AUTO:
            return AUTO_WINDOW if is_stream else 0
        return int(self.progressive_window)

    def row_settings(self) -> RowSettings | None:
        """How rows are held; None: whole, in the precision of training."""
        if self.prune.is_used:
            return self.prune.settings(self.held_in)
        return RowPrecision(self.held_in) if self.held_in != PLAIN else None

    def row_rule(self) -> RowOptimizerRule:
        """The row optimizer that ``rows`` describes."""
        return row_optimizer(self.rows.name, **{**self.rows.options, "lr": self.rows.lr})

    def dense_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer that ``dense`` describes, over the given parameters."""
        kind = getattr(torch.optim, self.dense.name, None)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            known = [name for name in dir(torch.optim) if name[0].isupper() and name != "Optimizer"]
            raise ConfigError(f"dense.name: no {self.dense.name!r} in torch.optim; it has {', '.join(known)}")
        if kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
            raise ConfigError(
                f"dense.name: {self.dense.name} is not supported: it needs closures or sparse gradients"
            )
        if self.dense.options.get("differentiable"):
            raise ConfigError(
                "dense.options: differentiable is true, which is for gradients of a step itself; training "
                "takes none: leave it out"
            )
        try:
            make: Callable[..., torch.optim.Optimizer] = kind
            given = {**self.dense.options, "lr": self.dense.lr}
            options = options_for_device(kind, given, parameters)
            return make(parameters, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"dense: torch.optim.{self.dense.name} rejects its options: {error}") from None
