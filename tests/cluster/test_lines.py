"""Messages between watchdogs: many at once, to a rank that reads none for a while, and from many ranks."""

import json
import selectors
import socket

from rowhaul._activity import Page
from rowhaul.cluster.watchdog import hub, lines
from rowhaul.cluster.watchdog.hub import Hub
from rowhaul.cluster.watchdog.lines import Lines
from rowhaul.cluster.watchdog.process import Watchdog
from rowhaul.cluster.watchdog.settings import Settings
from rowhaul.cluster.watchdog.stalls import Stall


def pair():
    ours, theirs = socket.socketpair()
    return Lines(ours), Lines(theirs)


def test_a_message_is_limited_but_not_how_many_arrive_at_once(monkeypatch):
    monkeypatch.setattr(lines, "_MOST_BYTES", 1000)
    sender, receiver = pair()
    for number in range(100):
        sender.connection.send(json.dumps({"number": number, "text": "x" * 50}).encode() + b"\n")
    heard = [*receiver.receive(), *receiver.receive(), *receiver.receive()]
    assert [one["number"] for one in heard] == list(range(100))
    assert not receiver.is_closed
    sender.connection.send(b"x" * 5000)
    assert (receiver.receive(), receiver.is_closed) == ([], True)
    sender.close()
    receiver.close()


def test_a_rank_that_reads_nothing_for_a_while_is_not_cut_off():
    """The hub tells rank 0 of all ranks in every round, also while a thread there holds the lock."""
    rank, channel = socket.socketpair()
    watchdog = Watchdog(Page(), channel)
    from_hub, watchdog._to_hub = pair()
    beats = {str(number): [7, 99, [[1, 12.5], [4, 0.1]], False, False] for number in range(1024)}
    for number in range(200):
        from_hub.send({"table": {**beats, "0": [number, 0, [], False, False]}})
        watchdog._hear_hub()
    assert not watchdog._channel.is_closed
    reader, heard = Lines(rank), []
    while watchdog._channel.is_behind or not heard:
        watchdog._channel.flush()
        heard += reader.receive()
    from_hub.send({"table": {"0": [1000, 0, [], False, False]}})
    watchdog._hear_hub()
    assert [one["table"]["0"][0] for one in reader.receive()] == [1000]
    for one in (reader, watchdog._channel, from_hub, watchdog._to_hub, watchdog._wake, watchdog._woken):
        one.close()
    watchdog._selector.close()


def test_the_stacks_of_a_few_ranks_are_enough():
    """All ranks get them: those of hundreds would be more than may wait to be sent."""
    roles = tuple(f"worker {rank}" for rank in range(40))
    settings = Settings(0, 1, "run", roles, ("",) * 40, "127.0.0.1", stacks=True)
    with selectors.DefaultSelector() as selector:
        made = Hub(settings, selector, lambda call: None)
        pairs = [pair() for _ in roles]
        made._lines = {rank: ours for rank, (ours, _) in enumerate(pairs)}
        made._tell_stall(Stall("waiting for all", tuple(range(40))))
        asked = [rank for rank, (_, theirs) in enumerate(pairs) if {"want_stacks": True} in theirs.receive()]
        assert asked == list(range(hub._MOST_ASKED))
        made._listener.close()
    for both in pairs:
        for one in both:
            one.close()
