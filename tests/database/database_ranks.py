"""Runs one function on every rank of a distributed database: threads of this process, one a rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from rowhaul.database import DistributedEmbeddingDatabase
from rowhaul.transport.in_process import InProcessNetwork


def run_ranks(num_ranks, body, *arguments, tables, delay=None, timeout_seconds=30.0, **settings):
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
        errors = [future.exception(timeout=100) for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]
