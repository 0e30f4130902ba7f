"""TorchRec on Gloo, in an environment of its own; rows step in the fused backward, row-wise Adagrad.

Arguments: the folder of the work, the file for the speed (of rank 0), the steps, and how to shard: ``mixed``
puts large tables on one rank each and small ones on all, ``row`` cuts every table by rows, ``planner`` takes
what TorchRec's planner chooses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from net import Dense, Pace, Work, place
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import ShardingPlan
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)

SMALL_ROWS = 1000  # tables of fewer rows are replicated: their gradients are less than what would travel
FUSED = EmbeddingComputeKernel.FUSED.value  # on CPUs it would take dense gradients by itself: 30 x slower


class Model(nn.Module):
    """Tables that TorchRec shards, and the dense part."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        facts = work.facts
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{n}", embedding_dim=facts["dim"], num_embeddings=rows, feature_names=[f"f{n}"]
                )
                for n, rows in enumerate(work.num_rows)
            ],
            device=torch.device("meta"),
        )
        torch.manual_seed(0)
        self.dense = Dense(
            facts["num_dense"], len(work.num_rows), facts["dim"], facts["bottom"], facts["top"]
        )

    def forward(self, ids: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        return self.dense(self.tables(ids).values(), dense)


def sharded(model: Model, work: Work, way: str, ranks: int) -> nn.Module:
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    )
    if way == "planner":
        topology = Topology(world_size=ranks, local_world_size=1, compute_device="cpu")
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=work.facts["batch"] // ranks)
        plan = planner.plan(model, [sharder])
    else:
        # Large tables go to the rank that has least so far.
        loads, chosen = [0] * ranks, {}
        for n in sorted(range(len(work.num_rows)), key=lambda one: -work.num_rows[one]):
            if way == "row":
                chosen[f"t{n}"] = row_wise(compute_kernel=FUSED)
            elif work.num_rows[n] < SMALL_ROWS:
                chosen[f"t{n}"] = data_parallel()
            else:
                rank = loads.index(min(loads))
                loads[rank] += 1  # every sample has an id of each table: traffic, not memory, decides
                chosen[f"t{n}"] = table_wise(rank=rank, compute_kernel=FUSED)
        plan = ShardingPlan(
            {
                "tables": construct_module_sharding_plan(
                    model.tables, chosen, sharder=sharder, local_size=1, world_size=ranks, device_type="cpu"
                )
            }
        )
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def main() -> None:
    folder, pace_file, steps, way, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    dist.init_process_group("gloo")
    rank, ranks = place()
    work = Work(Path(folder))
    model = sharded(Model(work), work, way, ranks)
    fused = {id(one) for one in model.fused_optimizer.params.values()}
    others = [one for one in model.parameters() if id(one) not in fused]
    replicated = [one for name, one in model.named_parameters() if ".tables." in name and one.dim() == 2]
    small = {id(one) for one in replicated}
    optimizers = [torch.optim.Adam([one for one in others if id(one) not in small], lr=0.001)]
    if small & {id(one) for one in others}:
        optimizers.append(torch.optim.Adagrad([one for one in others if id(one) in small], lr=0.05))
    names = [f"f{n}" for n in range(len(work.num_rows))]
    pace = Pace(Path(pace_file) if rank == 0 else None, work.facts["batch"], work.facts["every"])
    for step in range(int(steps)):
        ids, lengths, numbers, labels = work.part(step, rank, ranks)
        logits = model(KeyedJaggedTensor(keys=names, values=ids, lengths=lengths), numbers)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pace.step(step + 1, loss)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
