"""What a worker refuses instead of answering for one cache."""

from __future__ import annotations

import contextlib

import pytest
from in_process_cluster import Rank, RankErrorsError, run_cluster, train_batch
from scripted_cases import script

from rowhaul.errors import ConfigError
from rowhaul.nn import Batch, RowOptimizer
from rowhaul.planning.disagreement import DisagreementError
from rowhaul.train.distributed.evaluation import evaluate

REFUSED = {
    "state_dict": (lambda model: model.state_dict(), "state_dict.. on a worker.*save_checkpoint"),
    "load_state_dict": (lambda model: model.load_state_dict({}), "load_state_dict.. on a worker.*checkpoint"),
    "rows": (lambda model: model.rows.rows(model.rows.embedding_bag_configs()[0].name), "rows.. on a worker"),
    "num_rows": (lambda model: model.rows.num_rows("x"), "num_rows.. on a worker.*held"),
    "clear": (lambda model: model.rows.clear(), "clear.. on a worker"),
    "step": (lambda model: RowOptimizer(model).step(), "training.step.. steps the rows"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_calls_that_would_see_one_cache_say_what_to_call_instead(call: str) -> None:
    ask, message = REFUSED[call]

    def train(rank: Rank, batch: Batch) -> float:
        with pytest.raises(ConfigError, match=message):
            ask(rank.model)
        return train_batch(rank, batch)

    run_cluster(script({0: "x"}, {1: "x"}), train=train)


COLLECTIVE = {
    "evaluate": lambda rank: evaluate(rank.training, []),
    "flushed": lambda rank: rank.training.flushed(),
    "held": lambda rank: rank.training.held(),
    "compare_replicas": lambda rank: rank.training.compare_replicas(),
    "state_dict": lambda rank: rank.training.state_dict(rank.dense),
    "batches": lambda rank: list(rank.training.batches()),
    "close": lambda rank: rank.training.close(),
}


@pytest.mark.parametrize("call", COLLECTIVE)
@pytest.mark.parametrize("inside", [False, True], ids=["after it was left", "inside"])
def test_collective_calls_before_the_loop_has_ended_are_errors(call: str, inside: bool) -> None:
    class Calling(Rank):
        def run(self) -> None:
            try:
                for batch in self.training.batches():
                    train_batch(self, batch)
                    if inside:
                        COLLECTIVE[call](self)
                    break
                COLLECTIVE[call](self)
            except BaseException as error:
                self.error = error
                self._network.fail(error)
            finally:
                self.training.close()
                self.feed.close()

    case = script({0: "x", 1: "y"}, {0: "y"}, {1: "x"}, {0: "x", 1: "y"}, {0: "x"}, {1: "x"})
    with pytest.raises(RankErrorsError) as found:
        run_cluster(case, kind=Calling)
    refused = [error for error in found.value.errors if isinstance(error, ConfigError)]
    assert refused
    assert all("has not ended: it was left early" in str(error) for error in refused)


@pytest.mark.parametrize("call", ["evaluate", "flushed", "held", "compare_replicas"])
@pytest.mark.parametrize("callers", [(0, 1, 2), (0,), (3,)], ids=["workers", "rank 0", "the store"])
def test_a_call_on_some_ranks_while_others_train_is_an_error_on_all(
    call: str, callers: tuple[int, ...]
) -> None:
    """Every rank is a host of its own here."""

    class Calling(Rank):
        def run(self) -> None:
            try:
                for batch in self.training.batches(2):
                    train_batch(self, batch)
                if self.rank in callers:
                    COLLECTIVE[call](self)
                for batch in self.training.batches():
                    train_batch(self, batch)
            except BaseException as error:
                self.error = error
            finally:
                self.training.close()
                self.feed.close()

    with pytest.raises(RankErrorsError) as found:
        run_cluster(script({0: "x", 1: "y"}, {0: "y"}, {1: "x"}, {0: "x"}), kind=Calling)
    assert [type(error) for error in found.value.errors] == [DisagreementError] * 4
    assert all("while the others" in str(error) for error in found.value.errors)


def test_an_error_in_the_loop_is_the_ranks_failure_before_its_threads_are_waited_for() -> None:
    mistake, known = KeyError("a user's mistake"), []

    class Failing(Rank):
        def run(self) -> None:
            try:
                with contextlib.closing(self.training):
                    for batch in self.training.batches():
                        if self.rank == 0:
                            raise mistake
                        train_batch(self, batch)
            except BaseException as error:
                self.error = error
                known.append(self.runtime.failure.error)
                self._network.fail(error)

    with pytest.raises(RankErrorsError):
        run_cluster(script({0: "x", 1: "y"}, {0: "y"}, {1: "x"}), kind=Failing)
    assert known[0] is mistake


@pytest.mark.parametrize("call", [one for one in COLLECTIVE if one != "close"])
def test_collective_calls_after_close_are_errors(call: str) -> None:
    class Calling(Rank):
        def run(self) -> None:
            try:
                for batch in self.training.batches(2):
                    train_batch(self, batch)
                for _ in range(2):  # the second time nothing is left to do
                    self.training.close()
                with pytest.raises(ConfigError, match=r"training was closed.*before training.close"):
                    COLLECTIVE[call](self)
            except BaseException as error:
                self.error = error

    run_cluster(script({0: "x", 1: "y"}, {0: "y"}, {1: "x"}), kind=Calling)
