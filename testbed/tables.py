"""What the commands print, as tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.counters import Counters
from testbed.layout import Network
from testbed.measure import Speeds


def ranks_table(network: Network) -> str:
    """Ranks, their links and addresses."""
    rows = [
        (
            str(rank),
            network.role(rank),
            str(network.links[rank]),
            network.haul_address(rank),
            network.side_address(rank),
            network.namespace(rank),
        )
        for rank in network.ranks
    ]
    return _table(("rank", "role", "link", "haul0 (shaped)", "side0", "namespace"), rows)


def speeds_table(network: Network, alone: Sequence[Speeds], together: Sequence[Speeds]) -> str:
    """Shaped against achieved Mbit/s, with the slower direction's share of the shape."""
    rows = []
    for rank in network.ranks:
        shaped = network.links[rank].bytes_per_second
        slowest = min(alone[rank].sent, alone[rank].received, together[rank].sent, together[rank].received)
        achieved = (alone[rank].sent, alone[rank].received, together[rank].sent, together[rank].received)
        rows.append(
            (
                str(rank),
                network.role(rank),
                *(_megabits(speed) for speed in (shaped, *achieved)),
                f"{100 * slowest / shaped:.0f} %",
            )
        )
    heads = ("rank", "role", "shaped", "alone: sent", "received", "together: sent", "received", "least")
    return "Mbit/s of payload, both directions at once\n\n" + _table(heads, rows)


def traffic_table(network: Network, counters: Counters) -> str:
    """Bytes that the kernel counted on each rank's interfaces."""
    rows = [
        (
            str(rank),
            network.role(rank),
            str(network.links[rank]),
            *(
                f"{count:,}"
                for traffic in (counters.haul[rank], counters.side[rank])
                for count in (traffic.sent_bytes, traffic.received_bytes)
            ),
        )
        for rank in network.ranks
    ]
    return _table(("rank", "role", "link", "haul0 sent", "received", "side0 sent", "received"), rows)


def _megabits(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e6:.4g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *rows)
    )
