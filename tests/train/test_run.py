"""Runs in a folder: stopping, resuming to the same bits, and refusing what does not fit."""

import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_trainer import state_bytes

from click_logs import click_log
from rowhaul.checkpoint import latest_checkpoint
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError, DataError
from rowhaul.export.export import export
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.checkpoint_pace import Pace, pace_of
from rowhaul.train.config import ModelConfig, OptimizerConfig, RateSchedule
from rowhaul.train.run_folder import CONFIG_FILE, begin_folder, is_empty
from save_threads import wait_for_saves
from slow_cases import mostly_slow

CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=4, options={"dropout": 0.2}),
    rows=OptimizerConfig("adam", 0.01),
    rates=RateSchedule(warmup_steps=5, decay="cosine"),
    batch_size=256,
    epochs=2,
    shuffle_rows=1000,
    checkpoint_every=7,
)


def stop_after(num_steps):
    calls = iter(range(1, 10**6))
    return lambda: next(calls) >= num_steps


@pytest.mark.parametrize("stop_at", mostly_slow([1, 11, 24, 40], 1, 24))
def test_a_stopped_run_resumes_to_the_same_bits(stop_at, tmp_path, log_schema, log_folder):
    straight = train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a", eval_data=log_folder / "test")
    assert straight.step == 2 * 24  # 6,000 samples in batches of 256, twice
    stopped = train_run(CONFIG, log_schema, log_folder, out=tmp_path / "b", should_stop=stop_after(stop_at))
    assert stopped.interrupted
    assert stopped.step == stop_at
    resumed = train_run(
        CONFIG, log_schema, log_folder, out=tmp_path / "b", resume=True, eval_data=log_folder / "test"
    )
    assert (resumed.step, resumed.metrics) == (straight.step, straight.metrics)
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


def test_a_run_killed_between_checkpoints_resumes_from_the_last(tmp_path, log_schema, log_folder):
    def killed():
        raise RuntimeError("killed")

    calls = stop_after(12)
    with pytest.raises(RuntimeError, match="killed"):
        train_run(
            CONFIG,
            log_schema,
            log_folder,
            out=tmp_path / "b",
            should_stop=lambda: killed() if calls() else False,
        )
    assert latest_checkpoint(tmp_path / "b" / "checkpoints").name == "step-000000007"
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "b", resume=True)
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a")
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


@pytest.mark.slow
def test_saves_by_the_clock_change_no_bits(tmp_path, log_schema, log_folder):
    config = replace(CONFIG, checkpoint_every="1e-6s", keep_checkpoints=1000)
    train_run(config, log_schema, log_folder, out=tmp_path / "a", should_stop=wait_for_saves)
    assert len(list((tmp_path / "a" / "checkpoints").iterdir())) > 40  # after nearly every step
    train_run(replace(config, checkpoint_every="1d"), log_schema, log_folder, out=tmp_path / "b")
    assert len(list((tmp_path / "b" / "checkpoints").iterdir())) == 1
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


@pytest.mark.parametrize("given", ["15", -1, "0s", "2 weeks", "", "1000d"])
def test_checkpoints_by_clock_or_step(given):
    if given == "15":
        assert pace_of(given) == Pace(steps=15)
        assert pace_of("1.5h") == Pace(seconds=5400)
        assert pace_of(0) == Pace()
        return
    with pytest.raises(ConfigError, match="checkpoint_every"):
        TrainConfig(checkpoint_every=given)


def test_the_log_has_every_step_once(tmp_path, log_schema, log_folder):
    config = replace(CONFIG, log_every=1, eval_every=10, rates=RateSchedule())
    train_run(config, log_schema, log_folder, out=tmp_path / "r", should_stop=stop_after(9))
    # As a killed run leaves it: lines of steps after the checkpoint, the last one cut short.
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 12, "loss": 1}\n{"kind": "tr')
    train_run(config, log_schema, log_folder, out=tmp_path / "r", resume=True, eval_data=log_folder / "test")
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 49))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [10, 20, 30, 40, 48]
    assert list((tmp_path / "r" / "tensorboard").glob("events.*"))
    assert len(list((tmp_path / "r" / "checkpoints").iterdir())) == config.keep_checkpoints


def test_more_epochs_may_be_added(tmp_path, log_schema, log_folder):
    config = replace(CONFIG, rates=RateSchedule())
    train_run(config, log_schema, log_folder, out=tmp_path / "a")
    train_run(replace(config, epochs=1), log_schema, log_folder, out=tmp_path / "b")
    train_run(config, log_schema, log_folder, out=tmp_path / "b", resume=True)
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


def test_a_folder_in_use_is_left_alone(tmp_path, log_schema, log_folder):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"holds files that are not of a run: precious\.txt; choose"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


OWN = {
    "config.yaml": "# tuned\nbatch_size: 500 # larger is slower\n",
    "schema.yaml": "# notes\n{}",
    "data.yaml": "# where it came from\nhost: here\n",
}


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize("names", [["config.yaml", "schema.yaml"], ["schema.yaml"], ["data.yaml"]])
def test_files_that_no_run_wrote_are_left_alone(names, resume, tmp_path, log_schema, log_folder):
    log_schema.write(tmp_path / "schema.yaml")
    schema = (tmp_path / "schema.yaml").read_text()
    (tmp_path / "schema.yaml").unlink()
    texts = {name: OWN[name].format(schema) for name in names}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    named = ", ".join(names).replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"holds files that are not of a run: {named}; choose another"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path, resume=resume)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == texts


def test_a_run_among_other_files_is_not_to_be_removed(tmp_path, log_schema, log_folder):
    begin_folder(tmp_path, CONFIG, log_schema, [log_folder], [])
    with pytest.raises(ConfigError, match="holds a run without a checkpoint; remove the folder"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path)
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"exists and is not empty; resume it \(--resume\)"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path)


@pytest.mark.parametrize("left", [["data.yaml"], ["data.yaml", "schema.yaml"]], ids=len)
def test_a_run_that_was_stopped_while_it_began_is_begun_again(left, tmp_path, log_schema, log_folder):
    begin_folder(tmp_path, CONFIG, log_schema, [log_folder], [])
    for path in tmp_path.iterdir():
        if path.name not in left:
            path.unlink()
    (tmp_path / f".tmp-{CONFIG_FILE}").write_text("mod")
    assert is_empty(tmp_path)
    train_run(replace(CONFIG, max_steps=2), log_schema, log_folder, out=tmp_path)


def test_an_export_is_not_resumed(finished, tmp_path, log_schema, log_folder):
    made = export(open_checkpoint(finished), tmp_path / "x")
    before = sorted(path.name for path in made.path.iterdir())
    with pytest.raises(ConfigError, match=r"x is an export and cannot be resumed; resume the run"):
        train_run(CONFIG, log_schema, log_folder, out=made.path, resume=True)
    with pytest.raises(ConfigError, match=r"holds files that are not of a run: README\.md"):
        train_run(CONFIG, log_schema, log_folder, out=made.path)
    assert sorted(path.name for path in made.path.iterdir()) == before


def test_a_run_of_an_earlier_version_is_resumed(tmp_path, log_schema, log_folder):
    checkpoints = str(tmp_path / "checkpoints")
    for config, out in ((CONFIG, tmp_path / "a"), (replace(CONFIG, checkpoints=checkpoints), tmp_path / "b")):
        train_run(config, log_schema, log_folder, out=out, should_stop=stop_after(9))
        for name in ("data.yaml", "contents.json"):
            (out / name).unlink()
        assert train_run(config, log_schema, log_folder, out=out, resume=True, should_stop=stop_after(1))


def test_a_bad_configuration_leaves_no_folder(tmp_path, log_schema, log_folder):
    with pytest.raises(ConfigError, match="unknown model"):
        train_run(replace(CONFIG, model=ModelConfig("x")), log_schema, log_folder, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, log_schema, log_folder):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_run(replace(CONFIG, max_steps=8), log_schema, log_folder, out=folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 128}, "was trained with batch_size = 256, now it is 128"),
        ({"max_steps": 20}, "was trained with max_steps = 8, now it is 20"),  # moves the decay
        ({"seed": 1}, "was trained with seed = 0, now it is 1"),
    ],
)
def test_resuming_with_other_settings_is_refused(change, message, finished, log_schema, log_folder):
    config = (
        replace(CONFIG, max_steps=8, **change) if "max_steps" not in change else replace(CONFIG, **change)
    )
    with pytest.raises(ConfigError, match=message):
        train_run(config, log_schema, log_folder, out=finished, resume=True)


def test_resuming_on_other_data_is_refused(finished, log_schema, log_folder):
    with pytest.raises(CheckpointError, match=r"was trained on other files: part-1.parquet is gone"):
        train_run(
            replace(CONFIG, max_steps=8), log_schema, log_folder / "part-0.parquet", out=finished, resume=True
        )


def test_resuming_on_other_data_of_the_same_size_is_refused(finished, log_schema, log_folder, tmp_path):
    for part, seed in (("part-0", 11), ("part-1", 12)):
        pq.write_table(click_log(3000, seed), tmp_path / f"{part}.parquet", row_group_size=700)
    with pytest.raises(CheckpointError, match="was trained on other files"):
        train_run(replace(CONFIG, max_steps=8), log_schema, tmp_path, out=finished, resume=True)


def test_a_resumed_run_uses_as_many_threads_as_before(finished, log_schema, log_folder):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        train_run(replace(CONFIG, max_steps=8), log_schema, log_folder, out=finished, resume=True)
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_a_finished_run_has_nothing_left_to_train(finished, log_schema, log_folder):
    """Resumed, it is only evaluated, and the log gets the evaluation once."""
    config = replace(CONFIG, max_steps=8)
    for _ in range(2):
        again = train_run(
            config, log_schema, log_folder, out=finished, resume=True, eval_data=log_folder / "test"
        )
        assert (again.steps_taken, again.step) == (0, 8)
        assert again.metrics is not None
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [8]


def test_an_evaluation_that_fails_loses_no_training(tmp_path, log_schema, log_folder):
    bad = click_log(100, 3)
    bad = bad.set_column(0, "click", pa.array([2] * 100, pa.int8()))
    pq.write_table(bad, tmp_path / "bad.parquet")
    with pytest.raises(DataError, match="label 'click' is 2"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path / "r", eval_data=tmp_path / "bad.parquet")
    assert latest_checkpoint(tmp_path / "r" / "checkpoints").name == "step-000000048"


def test_ids_of_another_type_than_in_training_are_refused(finished, log_schema, log_folder, tmp_path):
    """The integer 7 and the string "7" are different keys: every id would be unknown, and nobody told."""
    table = click_log(100, 3)
    text = pa.array([str(key) for key in table["user"].to_pylist()])
    pq.write_table(table.set_column(2, "user", text), tmp_path / "text.parquet")
    trainer = load_trained(finished)
    with pytest.raises(DataError, match="'user' holds text ids, but the model was trained on integer ids"):
        trainer.evaluate(SampleStream(tmp_path / "text.parquet", log_schema, 50))


def test_a_checkpoint_of_another_model_is_refused(tmp_path, finished, log_schema, log_folder):
    shutil.copytree(finished, tmp_path / "run")
    replace(CONFIG, model=ModelConfig("legacy", 4)).write(tmp_path / "run" / "config.yaml")
    with pytest.raises(CheckpointError, match=r"is of another model \(dlrm\): weight .* absent"):
        load_trained(tmp_path / "run")
    replace(CONFIG, model=ModelConfig("dlrm", 8)).write(tmp_path / "run" / "config.yaml")
    with pytest.raises(CheckpointError, match="dim 4, adam, float32 there and dim 8, adam, float32 here"):
        load_trained(tmp_path / "run")


def test_a_folder_that_is_no_run_is_explained(tmp_path):
    with pytest.raises(CheckpointError, match="is no training run"):
        load_trained(tmp_path)


def forget_settings(checkpoint):
    """Make a checkpoint what earlier versions wrote: without its run's settings and its own checksum."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    facts = {name: one for name, one in manifest["facts"].items() if not name.startswith("run_")}
    del manifest["xxh3"]
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "facts": facts}))


def test_an_export_serves_the_same_scores_as_its_run(finished, log_schema, log_folder, tmp_path):
    made = export(open_checkpoint(finished), tmp_path / "x", format="safetensors")
    stream = SampleStream(log_folder / "test", log_schema, 8192)
    assert load_trained(made.path).evaluate(stream) == load_trained(finished).evaluate(stream)
    bare = next((finished / "checkpoints").iterdir())
    shutil.copytree(bare, tmp_path / "bare")
    made = export(open_checkpoint(tmp_path / "bare"), tmp_path / "z")
    assert load_trained(made.path).evaluate(stream) == load_trained(tmp_path / "bare").evaluate(stream)
    forget_settings(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="says nothing of its model"):
        load_trained(tmp_path / "bare")
    made = export(open_checkpoint(tmp_path / "bare"), tmp_path / "y")
    with pytest.raises(CheckpointError, match="says nothing of the model that its tables are of"):
        load_trained(made.path)


def test_a_run_whose_checkpoints_are_elsewhere_does_not_start_anew(
    finished, tmp_path, log_schema, log_folder
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "config.yaml")}
    for other in (str(tmp_path / "typo"), "memory://no-bucket/typo"):
        config = replace(CONFIG, max_steps=8, checkpoints=other)
        with pytest.raises(
            ConfigError, match=rf"are in {run}/checkpoints, the newest is step-000000008; copy"
        ):
            train_run(config, log_schema, log_folder, out=run, resume=True)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl says that one of step 8 was saved; bring"):
        train_run(replace(CONFIG, max_steps=8), log_schema, log_folder, out=run, resume=True)
    assert {name: (run / name).read_bytes() for name in before} == before
    shutil.copytree(finished / "checkpoints", tmp_path / "moved")
    config = replace(CONFIG, max_steps=8, checkpoints=str(tmp_path / "moved"))
    assert train_run(config, log_schema, log_folder, out=run, resume=True).steps_taken == 0


def test_a_run_without_a_checkpoint_yet_starts_anew_and_says_so(tmp_path, log_schema, log_folder):
    def killed():
        raise RuntimeError("killed")

    calls = stop_after(5)
    with pytest.raises(RuntimeError, match="killed"):
        train_run(
            replace(CONFIG, log_every=1),
            log_schema,
            log_folder,
            out=tmp_path,
            should_stop=lambda: killed() if calls() else False,
        )
    train_run(CONFIG, log_schema, log_folder, out=tmp_path, resume=True, should_stop=stop_after(8))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    assert notes == ["no checkpoint was saved yet: starting anew"]
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [7, 8]


def test_what_is_measured_may_change_when_a_run_resumes(tmp_path, log_schema, log_folder):
    grouped, held_out = replace(log_schema, group="user"), log_folder / "test"
    begun = {"out": tmp_path / "r", "eval_data": held_out}
    config = replace(CONFIG, rates=RateSchedule(), max_steps=3)
    train_run(config, grouped, log_folder, **begun)
    config = replace(config, max_steps=6, metrics=["hr@3"])
    resumed = train_run(config, grouped, log_folder, resume=True, **begun)
    straight = train_run(config, grouped, log_folder, eval_data=held_out)
    assert set(resumed.metrics.in_groups) == {"hr@3"}
    assert resumed.metrics == straight.metrics


def test_metrics_within_groups_need_a_group_also_when_a_run_resumes(
    finished, tmp_path, log_schema, log_folder
):
    shutil.copytree(finished, tmp_path / "run")
    config = replace(CONFIG, max_steps=8, metrics=["gauc"])
    with pytest.raises(ConfigError, match="metrics is gauc, which is measured within groups"):
        train_run(config, log_schema, log_folder, out=tmp_path / "run", resume=True)
