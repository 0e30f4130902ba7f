"""Send messages to several ranks while receiving others, of known sizes, from several."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rowhaul.transport.base import Bytes, Links


def swap(links: Links, sizes: Mapping[int, int], sends: Mapping[int, Bytes]) -> dict[int, Bytes]:
    """Send messages by rank, return those received, of the given sizes; one to this rank does not travel."""
    received = {peer: np.empty(size if peer != links.rank else 0, np.uint8) for peer, size in sizes.items()}
    transfer = links.post(
        {peer: data for peer, data in received.items() if peer != links.rank},
        {peer: data for peer, data in sends.items() if peer != links.rank},
    )
    if links.rank in received:
        received[links.rank] = sends[links.rank]
    transfer.wait_received()
    transfer.wait_sent()
    return received
