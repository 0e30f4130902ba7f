"""Plain PyTorch: tables as `nn.EmbeddingBag(sparse=True)`, one process, or DDP with sparse gradients.

Arguments: the folder of the work, the file for the speed (of rank 0), the steps, the threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from net import Dense, Pace, Work, place
from torch import nn


class Model(nn.Module):
    """Every table whole on every rank."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        facts = work.facts
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, facts["dim"], mode="sum", sparse=True, include_last_offset=True)
            for rows in work.num_rows
        )
        self.dense = Dense(
            facts["num_dense"], len(work.num_rows), facts["dim"], facts["bottom"], facts["top"]
        )

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        by_feature = lengths.view(len(self.tables), -1)
        parts = ids.split(by_feature.sum(dim=1).tolist())
        pooled = [
            table(part, nn.functional.pad(one.cumsum(0), (1, 0)))
            for table, part, one in zip(self.tables, parts, by_feature, strict=True)
        ]
        return self.dense(torch.cat(pooled, dim=1), dense)


def main() -> None:
    folder, pace_file, steps, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    rank, ranks = place()
    work = Work(Path(folder))
    model = Model(work)
    trained: nn.Module = model
    if ranks > 1:
        dist.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    sparse = torch.optim.Adagrad(model.tables.parameters(), lr=0.05)
    dense = torch.optim.Adam(model.dense.parameters(), lr=0.001)
    pace = Pace(Path(pace_file) if rank == 0 else None, work.facts["batch"], work.facts["every"])
    for step in range(int(steps)):
        ids, lengths, numbers, labels = work.part(step, rank, ranks)
        logits = trained(ids, lengths, numbers)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        pace.step(step + 1, loss)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
