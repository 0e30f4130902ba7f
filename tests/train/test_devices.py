"""Which workers may have which cards."""

import pytest

from rowhaul.errors import ConfigError
from rowhaul.train.distributed.devices import check_cards

ONE, OTHER, NONE = {"id": "GPU-1", "name": "H200"}, {"id": "GPU-2", "name": "H200"}, {}


@pytest.mark.parametrize(("hosts", "cards"), [
    ("aab", [ONE, OTHER, NONE]),
    ("aab", [NONE, NONE, NONE]),
    ("abc", [ONE, ONE, NONE]),  # cards without ids are numbered on each host
])  # fmt: skip
def test_a_card_for_each_worker_is_fine(hosts, cards):
    check_cards(hosts, cards, may_share=False)


def test_two_workers_on_one_card_are_refused_unless_they_may_share():
    with pytest.raises(ConfigError, match=r"ranks 0, 2 would share one card \(H200\).*--share-device"):
        check_cards("aaab", [ONE, OTHER, ONE, ONE], may_share=False)
    check_cards("aaab", [ONE, OTHER, ONE, ONE], may_share=True)
