"""The folder of a run: what is in it, and whether a run may start or resume there.

::

    run/
      config.yaml  schema.yaml     what was trained, on what
      data.yaml  contents.json     the files, see `rowhaul.train.run_data`
      metrics.jsonl                one line every ``log_every`` steps, for each evaluation and checkpoint
      tensorboard/                 the same for TensorBoard
      set_aside.jsonl              of a stream, see `rowhaul.train.run_stream`
      explain.jsonl                what moved and why, what waited; see `rowhaul.explain.explain_file`
      publish.json                 what published versions know it by, see `rowhaul.publishing`
      checkpoints/step-000001000/  see `rowhaul.checkpoint.layout`; elsewhere with ``checkpoints``
      logs/                        of each rank, where they are asked for
      .lock                        while a run is at work here, see `rowhaul.train.run_lock`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rowhaul._files import TEMPORARY_PREFIX
from rowhaul.checkpoint import MANIFEST_FILE, CheckpointReader, Place, as_place, latest_checkpoint
from rowhaul.checkpoint.layout import finished_checkpoints, remove_unfinished
from rowhaul.checkpoint.location import absolute, local_path
from rowhaul.checkpoint.opening import open_checkpoint, run_of
from rowhaul.checkpoint.writer import remove
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rowhaul.explain.explain_file import EXPLAIN_FILE
from rowhaul.export.manifest import MANIFEST_FILE as EXPORT_FILE
from rowhaul.train.config import TrainConfig
from rowhaul.train.log import BOARD, METRICS_FILE, last_saved_step
from rowhaul.train.ranking import check_grouped
from rowhaul.train.run_data import CONTENTS_FILE, DATA_FILE, remember_data, remembered_data
from rowhaul.train.run_lock import LOCK_FILE
from rowhaul.train.run_stream import SET_ASIDE_FILE

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
PUBLISH_FILE = "publish.json"
PUBLISHED_BY = "published_by"  # a fact of checkpoints: the name that published versions know the run by
NOTHING_SAVED = "no checkpoint was saved yet: starting anew"  # the note of a run that resumes from nothing
PROBE = ".rowhaul-probe"  # written to see whether checkpoints can be
_BEGUN_WITH = {DATA_FILE, SCHEMA_FILE, CONFIG_FILE}  # written anew whenever a run begins or resumes
_OF_A_RUN = _BEGUN_WITH | {
    CONTENTS_FILE,
    METRICS_FILE,
    BOARD,
    SET_ASIDE_FILE,
    EXPLAIN_FILE,
    PUBLISH_FILE,
    CHECKPOINTS,
    LOGS,
    LOCK_FILE,
}
_NAMED = 5  # files that an error lists
_CONFIG, _SCHEMA = "run_config", "run_schema"  # facts of a checkpoint
# Settings that may differ when a run resumes: they change what it reports or where, not what it learns.
_MAY_CHANGE = (
    "metrics",
    "eval_every",
    "patience",
    "checkpoint_every",
    "checkpoints",
    "keep_checkpoints",
    "log_every",
    "progressive_window",
    "stream",
    "publish",
    "cluster",
    "monitoring",
    "device",
    "device_memory",
)
_MAY_CHANGE_AT_CONSTANT_RATES = ("epochs", "max_steps")


def checkpoints_of(config: TrainConfig, folder: Path | None) -> Place | None:
    """Return where a run's checkpoints go; None: nowhere."""
    if config.checkpoints:
        return as_place(config.checkpoints)
    return folder / CHECKPOINTS if folder is not None else None


def is_empty(folder: Path) -> bool:
    """Whether a folder does not exist or has no run: only what those left that could not start."""
    return not folder.exists() or not (_names(folder) - _left_by_beginning(folder))


def is_run(folder: Path) -> bool:
    """Whether the settings in a folder are a run's: people, too, call files config.yaml and schema.yaml.

    Runs of earlier versions have no data.yaml, but a log or a checkpoint.
    """
    if not ((folder / CONFIG_FILE).is_file() and (folder / SCHEMA_FILE).is_file()):
        return False
    return (
        _remembers_data(folder)
        or (folder / METRICS_FILE).is_file()
        or latest_checkpoint(folder / CHECKPOINTS) is not None
    )


def _remembers_data(folder: Path) -> bool:
    try:
        return remembered_data(folder) is not None
    except CheckpointError:  # somebody else's file of that name
        return False


def _names(folder: Path) -> set[str]:
    """Return what is in a folder, without what was being written when its writer was killed."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY_PREFIX)}


def _left_by_beginning(folder: Path) -> set[str]:
    """Return what a run that could not start may have left, in the order of `begin_folder`."""
    left = {LOCK_FILE, LOGS}
    return left | {DATA_FILE, SCHEMA_FILE} if _remembers_data(folder) else left


def _strangers(folder: Path) -> list[str]:
    """Return what is in a folder that no run wrote."""
    names = _names(folder)
    own = _OF_A_RUN if is_run(folder) else _OF_A_RUN - _BEGUN_WITH | _left_by_beginning(folder)
    return sorted(names - own)


def _refusal(folder: Path) -> ConfigError:
    names = _strangers(folder)
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ConfigError(
        f"{folder} holds files that are not of a run: {', '.join(names[:_NAMED])}{more}; choose another --out"
    )


def check_new_run(folder: Path | None, checkpoints: Place | None) -> None:
    """Refuse to start a run where there is one already, or where there is anything else."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another --out")
    if folder is not None and not is_empty(folder):
        strangers = _strangers(folder)
        if strangers and not is_run(folder):
            raise _refusal(folder)
        if not strangers and is_run(folder) and not has_checkpoint(folder):
            raise ConfigError(
                f"{folder} holds a run without a checkpoint; remove the folder to start anew, or choose "
                "another --out"
            )
        raise ConfigError(f"{folder} exists and is not empty; resume it (--resume), or choose another --out")
    if checkpoints is not None and latest_checkpoint(checkpoints) is not None:
        raise ConfigError(
            f"{checkpoints} has checkpoints already; resume from them (--resume), or give other --checkpoints"
        )


def check_same_run(
    folder: Path | None, checkpoint: Place | None, config: TrainConfig, schema: Schema
) -> None:
    """Refuse to resume a run under settings that would teach it something else.

    They are compared with those in its folder or, on a machine that has none, in its checkpoint. Without one,
    only a run that has saved none yet may start anew.
    """
    if folder is not None and folder.is_dir():
        if (folder / EXPORT_FILE).is_file():
            raise ConfigError(
                f"{folder} is an export and cannot be resumed; resume the run that it was exported from, or "
                "choose another --out"
            )
        if _BEGUN_WITH.intersection(_strangers(folder)):  # they would be written over
            raise _refusal(folder)
    where: Place | None = folder
    saved = _settings_in(folder)
    if saved is None and checkpoint is not None:
        where, saved = checkpoint, saved_settings(CheckpointReader(checkpoint))
    if saved is None or where is None:
        raise ConfigError(
            f"{folder or config.checkpoints} holds no run to resume: it has no {CONFIG_FILE}; see whether "
            "its name is right, or leave out --resume to start one"
        )
    _check_same(where, *saved, config, schema)
    if checkpoint is None and folder is not None:
        _check_nothing_saved(folder, saved[0], config)


def _check_nothing_saved(folder: Path, before: TrainConfig, config: TrainConfig) -> None:
    """Refuse to start a run anew that has checkpoints elsewhere, or had some."""
    here, there = checkpoints_of(config, folder), checkpoints_of(before, folder)
    if here != there and there is not None and (newest := latest_checkpoint(there)) is not None:
        raise ConfigError(
            f"{here} has no checkpoint to resume from: those of this run are in {there}, the newest is "
            f"{newest.name}; copy them to {here}, or resume without other --checkpoints"
        )
    if (step := last_saved_step(folder)) is not None:
        raise ConfigError(
            f"{here} has no checkpoint to resume from, but {folder / METRICS_FILE} says that one of step "
            f"{step:,} was saved; bring the checkpoints back, or name the place where they are "
            f"(--checkpoints); to start anew, remove {folder} or choose another --out"
        )


def _check_same(
    where: Place, before: TrainConfig, schema_before: Schema, config: TrainConfig, schema: Schema
) -> None:
    now = config.to_dict()
    may_change = _MAY_CHANGE + (_MAY_CHANGE_AT_CONSTANT_RATES if config.rates.decay == "constant" else ())
    for name, value in before.to_dict().items():
        if name not in may_change and now[name] != value:
            convert = f", or rowhaul ckpt convert {where} --row-dtype {now[name]} --out NEW and resume that"
            raise ConfigError(
                f"{where} was trained with {name} = {value!r}, now it is {now[name]!r}; resume with the "
                f"same value, or start a new run in another --out{convert if name == 'row_dtype' else ''}"
            )
    if schema_before.as_parquet() != schema.as_parquet():
        raise ConfigError(f"{where} was trained with another schema; resume on the same data")
    if before.metrics != config.metrics:  # others are kept as they are: runs of earlier versions go on
        check_grouped(config.metrics, schema)


def run_facts(config: TrainConfig, schema: Schema) -> dict[str, Any]:
    """Return what a checkpoint says of its run, so that it can be used without the run's folder."""
    return {_CONFIG: config.to_dict(), _SCHEMA: schema.to_dict()}


def facts_for_another_run(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says that is true of a run made of it, too: that one has published nothing."""
    return {name: fact for name, fact in facts.items() if name != PUBLISHED_BY}


def saved_settings(reader: CheckpointReader) -> tuple[TrainConfig, Schema] | None:
    """Return the settings of a checkpoint's run: of the folder it is in, or those that it carries."""
    if (settings := _settings_in(run_of(reader))) is not None or _CONFIG not in reader.facts:
        return settings
    schema = Schema.from_dict(reader.facts[_SCHEMA], str(reader.path))
    return TrainConfig.from_dict(reader.facts[_CONFIG]), schema


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has a complete checkpoint, wherever it keeps them."""
    checkpoints = checkpoints_of(TrainConfig.read(folder / CONFIG_FILE), folder)
    return checkpoints is not None and latest_checkpoint(checkpoints) is not None


def _settings_in(folder: Path | None) -> tuple[TrainConfig, Schema] | None:
    if folder is None or not is_run(folder):
        return None
    return TrainConfig.read(folder / CONFIG_FILE), Schema.read(folder / SCHEMA_FILE)


def open_saved(path: str | Place) -> CheckpointReader:
    """Open a checkpoint, or the newest of a folder, a URL or a run, wherever that keeps them."""
    folder = local_path(as_place(path))
    if folder is not None and (folder / CONFIG_FILE).is_file() and not (folder / MANIFEST_FILE).is_file():
        checkpoints = checkpoints_of(TrainConfig.read(folder / CONFIG_FILE), folder)
        if checkpoints is not None and checkpoints != folder / CHECKPOINTS:
            return open_checkpoint(checkpoints)
    return open_checkpoint(path)


def settings_to_resume(folder: Path | None, checkpoints: str | None) -> tuple[TrainConfig, Schema] | None:
    """Return the settings and the schema of the run to resume; None where it has not begun.

    Where ``checkpoints`` says where they are, those of the newest checkpoint come first: all hosts see them,
    while the run's folder may be of one host alone.
    """
    for path in reversed(finished_checkpoints(checkpoints)) if checkpoints else ():
        try:
            saved = saved_settings(CheckpointReader(path))
        except DamagedCheckpointError:
            continue  # as resuming will do, which says so
        if saved is not None:
            return saved
    return _settings_in(folder)


def begin_folder(folder: Path, config: TrainConfig, schema: Schema, data: Any, eval_data: Any) -> None:
    """Create a run's folder; call it last, so that bad settings or data leave nothing behind."""
    folder.mkdir(parents=True, exist_ok=True)
    remember_data(folder, data, eval_data)  # first: it shows that what comes next is a run's
    schema.write(folder / SCHEMA_FILE)
    _from_anywhere(config).write(folder / CONFIG_FILE)  # last: without it there is no run


def _from_anywhere(config: TrainConfig) -> TrainConfig:
    """Settings whose paths lead there from any directory that the run is resumed in."""
    return replace(
        config,
        cluster=replace(config.cluster, secret_file=absolute(config.cluster.secret_file)),
        checkpoints=absolute(config.checkpoints),
        publish=replace(config.publish, to=absolute(config.publish.to)),
        monitoring=replace(config.monitoring, log_folder=absolute(config.monitoring.log_folder)),
    )


def drop_old_checkpoints(checkpoints: Place, keep: int) -> None:
    """Remove all but the newest complete checkpoints, and what interrupted saves left."""
    remove_unfinished(checkpoints)
    for old in finished_checkpoints(checkpoints)[:-keep]:
        remove(old)
