"""Runs one function on every rank of a distributed database: in threads of this process, or in processes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from rowhaul.database import DistributedEmbeddingDatabase
from rowhaul.transport.in_process import WAIT_SECONDS, InProcessNetwork


def run_ranks(num_ranks, body, *arguments, tables, delay=None, timeout_seconds=WAIT_SECONDS, **settings):
    """What ``body(db, *arguments)`` returns on each rank."""
    network = InProcessNetwork(num_ranks, delay=delay, timeout_seconds=timeout_seconds)

    def run(rank):
        links = [network.links(rank) for _ in range(3)]
        try:
            with DistributedEmbeddingDatabase(tables, links=links, **settings) as db:
                return body(db, *arguments)
        except BaseException as error:
            network.fail(error)
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_ranks)]
        errors = [future.exception(timeout=1.25 * WAIT_SECONDS) for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def run_processes(num_ranks, body, *arguments):
    """What ``body(rank, *arguments)`` returns in each process of a Gloo group."""
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    with ProcessPoolExecutor(num_ranks, multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(_rank, rank, num_ranks, store.port, timeout, body, arguments)
            for rank in range(num_ranks)
        ]
        return [future.result(timeout=200) for future in futures]


def _rank(rank, num_ranks, port, timeout, body, arguments):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        return body(rank, *arguments)
    finally:
        dist.destroy_process_group()
