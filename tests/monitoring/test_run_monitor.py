"""The numbers shown are those of the run: of its log, its plans, its links and its checkpoints."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from in_process_cluster import run_cluster
from scraping import collected
from scripted_cases import script

from rowhaul.errors import CheckpointError, RankLostError
from rowhaul.monitoring.health import check_health
from rowhaul.monitoring.monitor import RankLabels
from rowhaul.monitoring.run_monitor import RunMonitor
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.plan import KIND_NAMES, ROW_COUNTS
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.config import ModelConfig
from rowhaul.train.distributed.log import ClusterLog

CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=4), batch_size=500, log_every=3, eval_every=5, checkpoint_every=4
)


def lines_of(run, kind):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_one_process_shows_what_it_logs(tmp_path, log_schema, log_folder):
    monitor = RunMonitor()
    result = train_run(
        CONFIG, log_schema, log_folder, out=tmp_path / "r", eval_data=log_folder / "test", monitor=monitor
    )
    shown, last = collected(monitor), lines_of(tmp_path / "r", "train")[-1]
    assert shown["rowhaul_step"] == shown["rowhaul_steps_total"] == shown["rowhaul_planned_steps"] == 12
    assert shown["rowhaul_samples_total"] == result.samples == 6000
    assert shown["rowhaul_progress_ratio"] == 1
    assert last["step"] == 12
    assert shown["rowhaul_loss"] == last["loss"]
    assert shown["rowhaul_samples_per_second"] == last["samples_per_second"]
    evaluated = lines_of(tmp_path / "r", "eval")[-1]
    for name in ("auc", "log_loss", "normalised_entropy", "accuracy", "step"):
        assert shown[f"rowhaul_evaluation_{name}"] == evaluated[name]
    assert shown["rowhaul_checkpoints_total"] == 3
    assert shown["rowhaul_checkpoint_last_success_step"] == 12
    assert sum(shown.by("rowhaul_table_rows", "table").values()) == result.num_rows
    assert shown.by("rowhaul_rank_iteration", "rank", "role") == {("0", "worker"): 12}


def test_counters_of_a_resumed_run_begin_at_nothing(tmp_path, log_schema, log_folder):
    calls = iter(range(100))
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "r", should_stop=lambda: next(calls) == 4)
    monitor = RunMonitor()
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "r", resume=True, monitor=monitor)
    shown = collected(monitor)
    assert shown["rowhaul_step"] == 12
    assert shown["rowhaul_steps_total"] == 12 - 5
    assert shown["rowhaul_samples_total"] == 6000 - 5 * 500
    assert shown.by("rowhaul_rank_samples_total", "rank") == {("0",): 6000 - 5 * 500}


def test_what_is_learned_does_not_depend_on_being_watched(tmp_path, log_schema, log_folder):
    results = [
        train_run(CONFIG, log_schema, log_folder, eval_data=log_folder / "test", **more)
        for more in ({}, {"monitor": RunMonitor()})
    ]
    assert results[0].metrics == results[1].metrics


def test_a_checkpoint_that_fails_is_counted(tmp_path, log_schema, log_folder):
    monitor = RunMonitor()
    config = replace(CONFIG, checkpoint_every=0)
    calls = iter(range(100))

    def spoil():
        if next(calls) == 3:  # between the start and the only save, at the end
            (tmp_path / "r" / "checkpoints").write_text("a file where a folder should be")
        return False

    with pytest.raises(CheckpointError, match="checkpoints"):
        train_run(config, log_schema, log_folder, out=tmp_path / "r", should_stop=spoil, monitor=monitor)
    shown = collected(monitor)
    assert shown["rowhaul_checkpoint_failures_total"] == 1
    assert shown["rowhaul_checkpoints_total"] == 0
    assert ("rowhaul_checkpoint_last_success_step",) not in shown


@pytest.mark.parametrize("peer_to_peer", [False, True])
def test_a_cluster_shows_the_bytes_that_went_over_its_links(peer_to_peer):
    rows = [{0: "ab", 1: "bc", 2: "d"}, {0: "cd", 1: "ae", 2: "bf"}, {0: "ef", 1: "ab", 2: "c"}]
    case = script(*rows * 3, capacity=4, peer_to_peer=peer_to_peer, segments=(4, None))
    outcome = run_cluster(case)
    monitor = RunMonitor()
    roles = ["worker"] * 3 + ["store"]
    monitor.joined(
        [RankLabels(rank, role, "here") for rank, role in enumerate(roles)],
        [one.name for one in case.tables],
        MEASURES,
        lambda: None,
    )
    monitor.started(0, 0, 9, 27)
    for job in outcome.jobs[0]:
        monitor.iterated(job.plan, job.measures)
    shown = collected(monitor)
    links = {
        (int(source), int(target)): int(value)
        for (source, target), value in shown.by("rowhaul_link_bytes_total", "source", "target").items()
    }
    assert links == {link: total for link, total in outcome.posted.items() if total}
    assert sum(links.values()) > 0
    for name, label in (("moved_bytes", "kind"), ("table_moved_bytes", "table")):
        assert sum(shown.by(f"rowhaul_{name}_total", label).values()) == sum(links.values())
    for name in ("hits", "lookups"):
        counts = sum(getattr(plan, name) for plan in outcome.plans)
        per_rank = shown.by(f"rowhaul_cache_{name}_total", "rank")
        assert per_rank == {(str(rank),): count for rank, count in enumerate(counts)}
    trained = Counter(np.concatenate(outcome.workers).tolist())
    assert shown.by("rowhaul_rank_samples_total", "rank") == {(str(r),): trained[r] for r in range(4)}
    # Ranks report with a plan what they have finished by then: the first segment, at least.
    finished = shown.by("rowhaul_rank_iteration", "rank")
    assert all(4 <= value <= 9 for value in finished.values()), finished
    compute = [value for (phase, _), value in shown.by("rowhaul_rank_seconds_total", "phase", "rank").items()
               if phase == "compute"]  # fmt: skip
    assert len(compute) == 3
    assert min(compute) > 0


def test_measurements_count_once_for_every_iteration():
    """A message may repeat a rank's last measurements, or skip one."""
    monitor = RunMonitor()
    monitor.joined([RankLabels(0, "worker", "a"), RankLabels(1, "store", "b")], [], MEASURES, lambda: None)
    monitor.started(10, 100, 20, 200)
    compute, iteration = MEASURES.index("compute"), MEASURES.index("iteration")
    for finished, seconds in ((10, 0.0), (11, 1.0), (11, 1.0), (13, 2.0), (13, 2.0)):
        measures = np.zeros((2, len(MEASURES)))
        measures[0, [compute, iteration]] = seconds, finished
        measures[1, iteration] = finished
        monitor._measure(measures, has_rows=True)
    shown = collected(monitor)
    assert shown.by("rowhaul_rank_iteration", "rank", "host") == {("0", "a"): 13, ("1", "b"): 13}
    seconds = shown.by("rowhaul_rank_seconds_total", "rank", "phase")
    assert seconds["0", "compute"] == 1.0 + 2 * 2.0


def test_rows_that_plans_leave_out_count_as_ranks_report_them(tmp_path):
    """In the monitor and in the log: what is read of other ranks, and as many gradients.

    The first plans are agreed on before any rank has finished an iteration; they bring no counts.
    """
    monitor, topology = RunMonitor(), Topology(2, 0, colocated=True)
    labels = [RankLabels(0, "worker", "a"), RankLabels(1, "worker", "a")]
    monitor.joined(labels, ["user"], MEASURES, lambda: None)
    monitor.started(0, 0, 9, 9)
    settings = ScheduleSettings(
        topology=topology,
        sizes=RowSizes((64,), (4,)),
        prices=(1, 1),
        cache=CacheSettings(0),
        dispatcher="round-robin",
        sync="at-home",
    )
    ids = IdBatch.from_features([0], np.arange(4), np.ones((1, 4), np.int32))
    scheduler = Scheduler(settings, [ids] * 4)
    scheduler.count_no_rows()
    with ClusterLog(tmp_path, 0, topology, every=4) as log:
        for finished in (0, 0, 1, 2):
            assert scheduler.fill()
            measures = np.zeros((2, len(MEASURES)))
            measures[:, MEASURES.index("iteration")] = finished
            for name, counts in zip(ROW_COUNTS, ((10, 8), (6, 3), (256, 320), (320, 256)), strict=True):
                measures[:, MEASURES.index(name)] = counts if finished else 0
            job = Job(scheduler.plan(), None, measures=measures)
            monitor.iterated(job.plan, job.measures)
            log.iterated(job)
        log.write_more(4)
    shown = collected(monitor)
    assert shown.by("rowhaul_cache_lookups_total", "rank") == {("0",): 20, ("1",): 16}
    assert shown.by("rowhaul_cache_hits_total", "rank") == {("0",): 12, ("1",): 6}
    moved = {(kind,): 0 for kind in KIND_NAMES}
    both = ("miss_pull",), ("update_push",)
    assert shown.by("rowhaul_moved_rows_total", "kind") == {**moved, **dict.fromkeys(both, 18)}
    assert shown.by("rowhaul_moved_bytes_total", "kind") == {**moved, **dict.fromkeys(both, 2 * 576)}
    assert not shown.by("rowhaul_table_moved_bytes_total", "table"), "only plans that count rows know"
    assert not shown.by("rowhaul_link_bytes_total", "source", "target")
    (line,) = lines_of(tmp_path, "cluster")
    assert line["hit_ratio"] == 9 / 18
    assert line["rows/miss_pull"] == line["rows/update_push"] == 9
    assert line["bytes/miss_pull"] == line["bytes/update_push"] == 576
    assert line["link/worker 0 sent bytes"] == line["link/worker 1 received bytes"] == 576


def test_health_names_the_lost_rank_and_the_lack_of_progress():
    monitor, errors = RunMonitor(), []
    assert check_health(monitor, 60).is_ok
    monitor.begin("training")
    monitor.reach(1234, 0)
    stalled = check_health(monitor, 1e-9)
    assert not stalled.is_ok
    assert "while training, after step 1,234" in stalled.reason
    monitor.finish()
    assert check_health(monitor, 1e-9).is_ok
    monitor.joined([], [], MEASURES, lambda: errors[0] if errors else None)
    errors.append(RankLostError(3, "worker 3", "has died"))
    lost = check_health(monitor, 60)
    assert not lost.is_ok
    assert lost.reason == "RankLostError: rank 3 (worker 3) has died"
