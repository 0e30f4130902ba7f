"""Which card each worker trains on: one for each, unless they are told to share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from rowhaul.cluster.checks import gather_texts, wait_until_all_know
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import ranks_text
from rowhaul.errors import ConfigError
from rowhaul.train.config import TrainConfig
from rowhaul.train.trainer import usable_device

CPU = torch.device("cpu")


def device_of_rank(cluster: Cluster, config: TrainConfig) -> torch.device:
    """Return where this rank's model is, and make a card the thread's own; a collective call with cards.

    Workers of one host take its cards in the order of their ranks. Stores need none.

    Raises:
        ConfigError: on every rank, if two workers would have the same card and may not share it.
    """
    if config.device == "cpu":
        return CPU
    device, found = CPU, {}
    if cluster.is_worker:
        device = _chosen(config.device, cluster)
        torch.cuda.set_device(device)
        found = describe_card(device)
    texts = gather_texts(cluster, "choosing cards", json.dumps(found))
    hosts = [cluster.members[rank].host for rank in range(cluster.num_ranks)]
    try:
        check_cards(hosts, [json.loads(text) for text in texts], may_share=config.cluster.share_device)
    except ConfigError:
        wait_until_all_know(cluster)
        raise
    return device


def _chosen(name: str, cluster: Cluster) -> torch.device:
    """The card that is named, or that of this worker's place on its host."""
    usable_device(name)  # refuses where there is none
    if ":" in name:
        return torch.device(name)
    place = sum(rank < cluster.rank for rank in cluster.local_ranks)
    return torch.device("cuda", place % torch.cuda.device_count())


def describe_card(device: torch.device) -> dict[str, Any]:
    """Say which card it is, whatever number this process knows it by."""
    properties = torch.cuda.get_device_properties(device)
    return {"id": str(getattr(properties, "uuid", device.index)), "name": properties.name}


def check_cards(hosts: Sequence[str], cards: Sequence[dict[str, Any]], *, may_share: bool) -> None:
    """Refuse two workers on one card.

    Args:
        hosts: of each rank.
        cards: of each rank, as `describe_card` has them; empty on a store.
        may_share: whether they may.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (host, card) in enumerate(zip(hosts, cards, strict=True)):
        if card:
            ranks.setdefault((host, card["id"]), []).append(rank)
    for some in ranks.values():
        if len(some) > 1 and not may_share:
            raise ConfigError(
                f"{ranks_text(some)} would share one card ({cards[some[0]]['name']}), which makes none of "
                "them faster; start one worker for each card, or allow it with --share-device "
                "(cluster.share_device: true)"
            )
