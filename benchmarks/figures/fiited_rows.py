"""FIITED's table 1 and figures 2 and 3, redone: how unequal tables, rows and columns are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from expectation import expected_ids
from figures import plots
from figures.fiited import QUICK_SAMPLES
from figures.published import FIITED as SAYS
from figures.published import FIITED_SIZES
from figures.sections import Section, Table, percent, span
from pruning_methods.logs import SOURCES, Log, folder_of, read_log
from pruning_methods.methods import UNPRUNED, Case, MethodTrainer
from pruning_methods.runs import Run, config_of
from rowhaul.data.generate import preset_named
from rowhaul.nn import KeyedTensor
from rowhaul.pruning.narrowing import best_columns

Floats = npt.NDArray[np.float64]

PARTS = 5  # of the log, whose columns are compared
LARGEST = 10  # tables, of which the paper samples rows


def table_1() -> Section:
    """Bytes of all rows, as float32."""
    rows = []
    for data, (stated, dim) in FIITED_SIZES.items():
        preset = preset_named(data)
        num_rows = sum(expected_ids(preset, preset.samples).values())
        rows.append(
            [data, f"{stated:.2f}", str(dim), f"{num_rows:,.0f}", f"{4 * dim * num_rows / 2**30:.2f}"]
        )
    return Section(
        "fiited-table-1",
        "FIITED, table 1: the data",
        "Rows of a log of the real size, computed from the laws of the generated ones, and their values.",
        [Table(["", "paper, GB", "its dim", "rows here", "here, GiB"], rows)],
    )


def figures_2_and_3(quick: bool, out: Path) -> Section:
    """Ranks of tables, use of rows, importance of columns, in one unpruned run."""
    samples = QUICK_SAMPLES if quick else SOURCES["criteo"].samples
    run = Run("criteo", samples, 0, Case(UNPRUNED))
    folder_of(run.data, run.samples, run.seed)
    log = read_log(run.data, run.samples, run.seed)
    trainer = MethodTrainer(config_of(run, log), log, SOURCES["criteo"], run.case)
    columns = ColumnSums(trainer.collection, len(log.train))
    for batch in log.train:
        trainer.train_step(batch)
    tables = list(log.schema.tables)
    records = {table: all_rows(trainer, table) for table in tables}
    dim = SOURCES["criteo"].dim
    ranks = {
        share: [num_ranks(rows[:, :dim], share) for rows in records.values() if len(rows) >= dim]
        for share in (0.8, 0.9)
    }
    largest = sorted(range(len(tables)), key=lambda table: -log.num_rows[table])[:LARGEST]
    of_rows = [
        [tables[table], *(percent(share) for share in top_shares(log, tables[table], records[tables[table]]))]
        for table in largest
    ]
    kept = columns.stability()
    spread = columns.share_of_best_half()
    by_column = {f"part {part + 1}": columns.ordered(part).mean(axis=0).tolist() for part in range(PARTS)}
    panels = [
        plots.Panel(
            "FIITED, figure 2a: ranks that hold a share of the squared singular values",
            [f"table {place + 1}" if place % 4 == 0 else "" for place in range(len(ranks[0.8]))],
            {f"{percent(one, 0)}": sorted(values) for one, values in ranks.items()},
            ylabel=f"ranks of {dim}",
        ),
        plots.Panel(
            "FIITED, figure 3: squared gradients by column, mean of the tables",
            [place + 1 if place % 4 == 0 else "" for place in range(dim)],
            by_column,
            "columns, those with the most of the whole log first",
            "share of its table's",
            kind="lines",
        ),
    ]
    return Section(
        "fiited-02",
        "FIITED, figures 2 and 3: what is unequal",
        f"One unpruned model of {len(log.train):,} steps on the Criteo-like log, rows of {dim}. The table: "
        f"what the 1 % most read rows of the {LARGEST} largest tables take of the reads, and the 1 % with "
        "the largest gradients of the squared gradients.",
        [Table(["table", "reads of the top 1 %", "squared gradients of the top 1 %"], of_rows)],
        [
            (
                SAYS["ranks"],
                f"{min(ranks[0.8])} to {max(ranks[0.8])} of {dim} ranks hold 80 %, "
                f"{min(ranks[0.9])} to {max(ranks[0.9])} hold 90 %",
            ),
            (SAYS["hot rows"], "the table above"),
            (
                SAYS["columns"],
                f"the better half of a table's columns takes {span(spread)} of its squared gradients; of "
                f"those in the first fifth of the log {percent(kept)} are in the better half of the last (by "
                "chance 50 %)",
            ),
        ],
        plots=[plots.save(out / "fiited-02.png", panels)],
    )


class ColumnSums:
    """Squared gradients of the vectors of each table, summed by column, part by part of a log."""

    def __init__(self, collection: torch.nn.Module, num_steps: int) -> None:
        self._num_steps, self._step = num_steps, 0
        self.sums: Floats = np.zeros(0)  # parts x tables x columns
        collection.register_forward_hook(self._watch)

    def _watch(self, collection: torch.nn.Module, inputs: object, output: KeyedTensor) -> None:
        if output.values().requires_grad:
            widths = output.length_per_key()
            output.values().register_hook(lambda gradients: self._add(gradients, len(widths)))

    def _add(self, gradients: torch.Tensor, num_features: int) -> None:
        squares = (gradients.double() ** 2).sum(0).reshape(num_features, -1).numpy()
        if not self.sums.size:
            self.sums = np.zeros((PARTS, *squares.shape))
        self.sums[min(PARTS - 1, self._step * PARTS // self._num_steps)] += squares
        self._step += 1

    def ordered(self, part: int) -> Floats:
        """By table and column, as shares of the table; columns with the most of the whole log first."""
        order = np.argsort(-self.sums.sum(axis=0), axis=1)
        shares: Floats = self.sums[part] / self.sums[part].sum(axis=1, keepdims=True)
        return np.take_along_axis(shares, order, axis=1)

    def share_of_best_half(self) -> list[float]:
        """Of each table: what the half of its columns with the largest sums takes."""
        total = np.sort(self.sums.sum(axis=0), axis=1)
        half = total.shape[1] // 2
        shares: list[float] = (total[:, half:].sum(axis=1) / total.sum(axis=1)).tolist()
        return shares

    def stability(self) -> float:
        """How many of the best half of the columns at first are so at the end, on average of the tables."""
        half = self.sums.shape[2] // 2
        first, last = (best_columns(self.sums[part], half) for part in (0, PARTS - 1))
        return float(np.mean([len(np.intersect1d(a, b)) / half for a, b in zip(first, last, strict=True)]))


def all_rows(trainer: MethodTrainer, table: str) -> npt.NDArray[np.float32]:
    """All records of a table: values, then the sum of mean squared gradients."""
    return np.concatenate([records for _, records in trainer.collection.source.rows(table)])


def num_ranks(values: npt.NDArray[np.float32], share: float) -> int:
    """How many singular values, the largest first, hold a share of the sum of their squares."""
    squares = np.linalg.eigvalsh(values.T.astype(np.float64) @ values)[::-1]
    return int(np.searchsorted(np.cumsum(squares), share * squares.sum()) + 1)


def top_shares(log: Log, table: str, records: npt.NDArray[np.float32]) -> list[float]:
    """What the top 1 % of the rows of a table take of its reads, and of its squared gradients."""
    ids = [batch.ids[feature].values().numpy() for batch in log.train for feature in log.schema.tables[table]]
    reads = np.unique(np.concatenate(ids), return_counts=True)[1]
    shares = []
    for values in (reads, records[:, -1].astype(np.float64)):
        top = np.sort(values)[::-1][: max(1, len(values) // 100)]
        shares.append(float(top.sum() / values.sum()))
    return shares
