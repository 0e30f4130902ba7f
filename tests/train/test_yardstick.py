"""Whether one machine would be faster is told: once early in a run, and at its end."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rowhaul.train import TrainConfig
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.yardstick import Yardstick

CONFIG = TrainConfig(batch_size=1000)
STARTING = 10  # steps that may compile kernels


class Run:
    """A run in steps of 1,000 samples, reported to a yardstick."""

    def __init__(self, *hosts, config=CONFIG):
        topology = SimpleNamespace(num_workers=sum(map(len, hosts)))
        self.log = SimpleNamespace(timed=(0.0, 0))
        self.yardstick = Yardstick(SimpleNamespace(hosts=hosts, topology=topology), config, self.log)

    def step(self, took, compute=0.01, samples=500, reading=0.0):
        seconds = defaultdict(float, compute=compute, reading=reading)
        self.yardstick.observe(SimpleNamespace(seconds=seconds, num_samples=samples))
        self.log.timed = self.log.timed[0] + took, self.log.timed[1] + 1000
        return self.yardstick.news()


@pytest.mark.parametrize(
    ("took", "told"),
    [(0.05, "faster: at most 22 ms a step alone, these 2 workers took 50 ms;"), (0.0225, ""), (0.012, "")],
)
def test_one_machine_is_timed_by_what_a_sample_takes_here(took, told):
    """Two workers compute 500 samples each in 10 ms: alone it is 20, and a tenth, whatever the links add."""
    run = Run([0], [1])
    for number in range(30):
        run.step(took, compute=0.3 if number < STARTING else 0.01)
    assert run.yardstick.advice().startswith(told)
    assert bool(run.yardstick.advice()) == bool(told)


def test_steps_that_compile_count_for_neither():
    run = Run([0], [1])
    for number in range(100):
        assert run.step(2.0 if number < STARTING else 0.02) == ""
    assert run.yardstick.advice() == ""


def test_waiting_for_data_is_no_fault_of_the_cluster():
    """One machine would wait for them, too; where that is only a part of a step, it may be faster."""
    run, slow = Run([0], [1]), Run([0], [1])
    for _ in range(150):
        assert run.step(0.3, reading=0.285) == ""
        slow.step(0.3, reading=0.1)
    assert run.yardstick.advice() == ""
    assert slow.yardstick.advice().startswith("faster: at most 122 ms")


def test_it_is_news_once():
    """After 100 steps; at once where it is known beforehand."""
    runs = {"apart": Run([0], [1]), "together": Run([0, 1])}
    told = [(name, number) for number in range(250) for name, run in runs.items() if run.step(0.05)]
    assert told == [("together", 0), ("apart", 99)]
    assert "without --workers" in runs["together"].yardstick.advice()


@pytest.mark.parametrize(
    ("config", "hosts"),
    [
        (replace(CONFIG, cluster=ClusterConfig(shares="auto")), ([0], [1])),
        (CONFIG, ([0], [])),
        (replace(CONFIG, device="cuda"), ([0, 1],)),
    ],
)
def test_nothing_is_said_where_it_is_tried_or_does_not_hold(config, hosts):
    run = Run(*hosts, config=config)
    for _ in range(150):
        assert run.step(1.0, compute=0.001) == ""
    assert run.yardstick.advice() == ""


def test_a_rank_that_never_trained_says_nothing():
    run = Run([0], [1])
    for _ in range(150):
        run.step(1.0, compute=0.0, samples=0)
    assert run.yardstick.advice() == ""
