"""One rank of the peer in `torchrec_colocated`: TorchRec on Gloo. Runs in an environment of its own.

Arguments: a file of ids (steps x samples x tables), rows of a table, dim, steps to warm up, row optimizer,
and ways of sharding. Every rank prints, as JSON, the seconds a step of each way, and those of its processor.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import ShardingPlan
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise

OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}


class Model(nn.Module):
    """Tables, and one layer."""

    def __init__(self, num_tables: int, num_rows: int, dim: int) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{n}", embedding_dim=dim, num_embeddings=num_rows, feature_names=[f"f{n}"]
                )
                for n in range(num_tables)
            ],
            device=torch.device("meta"),
        )
        self.top = nn.Linear(num_tables * dim, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.tables(ids).values()).squeeze(1)


def sharded(way: str, num_tables: int, num_rows: int, dim: int, optimizer: str) -> nn.Module:
    model = Model(num_tables, num_rows, dim)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.05}
    )
    ranks = dist.get_world_size()
    kernel = (
        EmbeddingComputeKernel.FUSED.value
    )  # on CPUs it would take dense gradients by itself: 30 x slower
    chosen = {
        f"t{n}": table_wise(rank=n % ranks, compute_kernel=kernel)
        if way == "table"
        else row_wise(compute_kernel=kernel)
        for n in range(num_tables)
    }
    plan = construct_module_sharding_plan(
        model.tables, chosen, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )


def main() -> None:
    path, num_rows, dim, warm_up, optimizer, *ways = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = np.load(path, mmap_mode="r")
    steps, global_batch, num_tables = every.shape
    per_rank = global_batch // ranks
    names = [f"f{n}" for n in range(num_tables)]
    offsets = torch.arange(num_tables * per_rank + 1, dtype=torch.int32)
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, 2, global_batch)).float()
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    found = {}
    for way in ways:
        model = sharded(way, num_tables, int(num_rows), int(dim), optimizer)
        dense = torch.optim.SGD(model.module.top.parameters(), lr=0.05)
        batches = [np.ascontiguousarray(every[step, mine].T).reshape(-1) for step in range(steps)]
        for step, ids in enumerate(batches):  # as a reader has them: by feature
            if step == int(warm_up):
                dist.barrier()
                began, used = time.perf_counter(), time.process_time()
            keyed = KeyedJaggedTensor(keys=names, values=torch.from_numpy(ids), offsets=offsets)
            logits = model(keyed)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[mine])
            loss.backward()  # the rows are stepped here
            dense.step()
            dense.zero_grad()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        found[way] = [one / (steps - int(warm_up)) for one in (seconds, cpu)]
        dist.barrier()
        del model
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
