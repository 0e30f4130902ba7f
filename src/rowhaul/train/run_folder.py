"""The folder of a run: what is in it, and whether a run may start or resume there.

::

    run/
      config.yaml  schema.yaml     what was trained, on what
      metrics.jsonl                one line every ``log_every`` steps and for each evaluation
      tensorboard/                 the same for TensorBoard
      checkpoints/step-000001000/  see `rowhaul.checkpoint.layout`
"""

from __future__ import annotations

from pathlib import Path

from rowhaul.checkpoint import CheckpointReader, Place
from rowhaul.checkpoint.layout import finished_checkpoints, remove_unfinished
from rowhaul.checkpoint.writer import remove
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.train.config import TrainConfig

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
# Settings that may differ when a run resumes: they change what it reports or where, not what it learns.
_MAY_CHANGE = ("eval_every", "checkpoint_every", "keep_checkpoints", "log_every", "cluster")
_MAY_CHANGE_AT_CONSTANT_RATES = ("epochs", "max_steps")


def check_new_folder(folder: Path) -> None:
    """Refuse to start a run in a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; resume it (--resume), or choose another --out")


def check_same_config(folder: Path, config: TrainConfig, schema: Schema) -> None:
    """Refuse to resume a run under settings that would teach it something else."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / SCHEMA_FILE).is_file():
        raise ConfigError(f"{folder} holds no run to resume: it has no {CONFIG_FILE}; leave out --resume")
    before, now = TrainConfig.read(folder / CONFIG_FILE).to_dict(), config.to_dict()
    may_change = _MAY_CHANGE + (_MAY_CHANGE_AT_CONSTANT_RATES if config.rates.decay == "constant" else ())
    for name, value in before.items():
        if name not in may_change and now[name] != value:
            raise ConfigError(
                f"{folder} was trained with {name} = {value!r}, now it is {now[name]!r}; resume with the "
                "same value, or start a new run in another --out"
            )
    if Schema.read(folder / SCHEMA_FILE) != schema:
        raise ConfigError(f"{folder} was trained with another schema; resume on the same data")


def check_same_data(reader: CheckpointReader, stream: SampleStream) -> None:
    """Refuse to resume a checkpoint on other files than it was trained on."""
    if reader.facts["data"] != stream.fingerprint:
        raise CheckpointError(
            f"{reader.path} was trained on other files ({reader.facts['samples_per_epoch']:,} samples an "
            f"epoch, now {stream.num_samples:,}); resume on the same files, in the same order"
        )


def begin_folder(folder: Path, config: TrainConfig, schema: Schema) -> None:
    """Create a run's folder; call it last, so that bad settings or data leave nothing behind."""
    folder.mkdir(parents=True, exist_ok=True)
    config.write(folder / CONFIG_FILE)
    schema.write(folder / SCHEMA_FILE)


def drop_old_checkpoints(checkpoints: Place, keep: int) -> None:
    """Remove all but the newest complete checkpoints, and what interrupted saves left."""
    remove_unfinished(checkpoints)
    for old in finished_checkpoints(checkpoints)[:-keep]:
        remove(old)
