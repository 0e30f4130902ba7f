"""Every connection of a port goes to the process that has the fewest, as far as processes have said."""

import asyncio
import os
import resource
import socket
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn

from rowhaul.serve.connections import Dealer, DealtConnections


class Taker:
    """What a process does with the channel that it was given."""

    def __init__(self, channel):
        self.channel = channel
        self.connections = []
        channel.setblocking(False)

    def take(self):
        while True:
            try:
                _, files, _, _ = socket.recv_fds(self.channel, 1, 1)
            except BlockingIOError:
                return
            self.connections += [socket.socket(fileno=one) for one in files]

    def end_one(self):
        self.connections.pop().close()
        self.channel.send(b"-")

    def close(self):
        self.channel.close()
        for one in self.connections:
            one.close()


@pytest.fixture
def port():
    """A dealer, and what connects clients to it and starts processes; everything is closed at the end."""
    with ExitStack() as opened:
        bound = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        dealer = Dealer(bound)
        opened.callback(dealer.close)

        def connect(count):
            for _ in range(count):
                opened.enter_context(socket.create_connection(bound.getsockname()))

        def start():
            taker = Taker(dealer.channel())
            opened.callback(taker.close)
            return taker

        yield dealer, connect, start


def dealt(dealer, *takers):
    """The connections of each process, once everything that was said or asked for is dealt with."""
    for _ in range(4):
        dealer.deal([], 0.05)
    for one in takers:
        one.take()
    return [len(one.connections) for one in takers]


def test_each_goes_to_the_process_with_the_fewest(port):
    dealer, connect, start = port
    first, second = start(), start()
    connect(3)
    assert dealt(dealer, first, second) == [0, 0]  # nobody is ready: they wait
    first.channel.send(b"+")
    assert dealt(dealer, first, second) == [3, 0]
    second.channel.send(b"+")
    connect(6)
    assert dealt(dealer, first, second) == [5, 4]
    for _ in range(3):
        second.end_one()
    connect(4)
    assert dealt(dealer, first, second) == [5, 5]


def test_a_process_that_has_ended_gets_none(port):
    dealer, connect, start = port
    first, second = start(), start()
    for one in (first, second):
        one.channel.send(b"+")
    connect(4)
    assert dealt(dealer, first, second) == [2, 2]
    first.close()
    connect(5)
    assert dealt(dealer, second) == [7]
    third = start()
    third.channel.send(b"+")
    connect(3)
    assert dealt(dealer, second, third) == [7, 3]


@contextmanager
def no_descriptors():
    """Nothing can be opened in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_connection_that_no_descriptor_is_left_for_is_counted_as_closed():
    async def heard(channel):
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(channel, 10), 20)

    async def said_of(here, there, given):
        config = uvicorn.Config(lambda scope: None)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        taken = DealtConnections(there, server)
        assert await heard(here) == b"+"
        try:
            with no_descriptors():
                socket.send_fds(here, [b"c"], [given.fileno()])
                return await heard(here)
        finally:
            taken.close()

    here, there = socket.socketpair()
    here.setblocking(False)
    with here, there, socket.socket() as given:
        assert asyncio.run(said_of(here, there, given)) == b"-"
