"""Runs one function on several ranks: real processes, or threads over the in-process network."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rowhaul.transport.base import Collective, Links
from rowhaul.transport.collectives import PairwiseCollective
from rowhaul.transport.gloo import connect_group
from rowhaul.transport.in_process import InProcessNetwork

TIMEOUT = timedelta(seconds=60)
Body = Callable[..., Any]  # takes the links, the collective and the arguments given


def run_processes(num_ranks: int, body: Body, *arguments: Any, hosts: str = "") -> list[Any]:
    """What ``body(links, collective, *arguments)`` returns on each rank; None from one that died.

    Args:
        num_ranks: how many processes.
        body: what each of them does.
        arguments: for it.
        hosts: a letter for each rank; those with the same one share memory. By default nobody does.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(theirs, rank, num_ranks, store.port, hosts, body, arguments)
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        answers = [_answer(end) for end in ends]
        for end in ends:
            end.close()
        for process in processes:
            process.join(TIMEOUT.total_seconds())
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, (_, error) in enumerate(answers):
        assert error is None, f"rank {rank}:\n{error}"
    return [result for result, _ in answers]


def run_threads(num_ranks: int, body: Body, *arguments: Any) -> list[Any]:
    """The same between threads."""
    network = InProcessNetwork(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [
            pool.submit(body, network.links(rank), network.collective(rank), *arguments)
            for rank in range(num_ranks)
        ]
        return [future.result() for future in futures]


def mapped_bytes() -> int:
    """Bytes of messages' memory that this process has mapped, both ends of one counted twice."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:rowhaul-messages" in line:
            start, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total


def _answer(end: Connection) -> tuple[Any, str | None]:
    if not end.poll(TIMEOUT.total_seconds()):
        return None, "no answer in time"
    try:
        return end.recv()  # type: ignore[no-any-return]  # multiprocessing returns Any
    except EOFError:
        return None, None


def _rank(
    answer: Connection,
    rank: int,
    num_ranks: int,
    port: int,
    hosts: str,
    body: Body,
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        host = hosts[rank] if hosts else str(rank)
        links: Links = connect_group(dist.new_group(), host)
        collective: Collective = PairwiseCollective(connect_group(dist.new_group(), host))
        answer.send((body(links, collective, *arguments), None))
    except BaseException:
        answer.send((None, traceback.format_exc()))
    answer.poll(TIMEOUT.total_seconds())  # until all have answered: a lost peer is an error elsewhere
    os._exit(0)  # without the destructors, which wait for peers that may be gone
