"""What a worker refuses instead of answering for one cache."""

from __future__ import annotations

import pytest
from in_process_cluster import Rank, run_cluster, train_batch
from scripted_cases import script

from rowhaul.errors import ConfigError
from rowhaul.nn import Batch, RowOptimizer

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
