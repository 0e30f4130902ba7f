"""`DeviceTables`: tables of one row size on a card: raw keys in, records out, stepped in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device import row_kernels, step_kernels
from rowhaul.device.arena import DeviceArena
from rowhaul.device.batches import Bags
from rowhaul.device.index import MOST_TABLES, DeviceIndex
from rowhaul.device.launch import columns_of, grid_of, limited, rows_together
from rowhaul.device.segments import LONG, PIECE, Segments
from rowhaul.errors import ConfigError
from rowhaul.optim import SGD, Adagrad, Adam, RowOptimizerRule, RowwiseAdagrad
from rowhaul.store import TableSpec
from rowhaul.store.tables import table_seeds

_RULES = {
    SGD: step_kernels.SGD,
    Adagrad: step_kernels.ADAGRAD,
    RowwiseAdagrad: step_kernels.ROWWISE,
    Adam: step_kernels.ADAM,
}
_SPARE = 0.05  # the share of free memory, or of all records, that may be allocated for keys that may be new
_CHUNK_OF_HOST = 1 << 24  # the same where there is no card
_ONE_CHUNK = 30  # shift of memory in one piece
# Threads that exchange products to sum them would each round the other's alone, and get different sums.
_FUSES = False
_BLOCK_ROWS = 1 << 16  # rows copied at a time when a table is read whole


class DeviceTables:
    """Tables of one row size under one row optimizer, on a card."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: torch.dtype,
        seed: int,
        device: torch.device,
    ) -> None:
        if len(tables) > MOST_TABLES:
            raise ConfigError(
                f"{len(tables):,} tables of one row size are more than a card's index numbers "
                f"({MOST_TABLES:,}); let features share tables"
            )
        self.tables, self.optimizer, self.device = tuple(tables), optimizer, device
        self.dim, self.dtype = tables[0].dim, dtype
        if type(optimizer) not in _RULES:
            raise ConfigError(
                f"{type(optimizer).__name__} does not step rows on a card, where kernels do; take one of "
                f"{', '.join(one.__name__ for one in _RULES)}, or leave rows in host memory"
            )
        self._rule = _RULES[type(optimizer)]
        self._seeds = torch.from_numpy(table_seeds([table.name for table in tables], seed).view(np.int64)).to(
            device
        )
        lows = np.array([table.initial_low for table in tables])
        steps = np.array([(table.initial_high - table.initial_low) / 2**24 for table in tables])
        self._lows, self._steps = (torch.from_numpy(one).to(device) for one in (lows, steps))
        self._first_state = torch.tensor([optimizer.initial_state], dtype=torch.float64).to(device)
        self._settings: tuple[float, ...] = ()
        self._settings_there = torch.zeros(5, dtype=torch.float64).to(device)
        self._nothing = torch.zeros(1, dtype=dtype).to(device)
        self._one_column = torch.zeros(1, dtype=torch.int64, device=device)
        self._no_mean = torch.zeros(1, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        self.index = DeviceIndex(self.device)
        self.arena = DeviceArena(self.dim, self.optimizer.state_width(self.dim), self.dtype, self.device)
        self.arena.reserve(1)  # kernels read some record where there is nothing to read

    @property
    def memory_version(self) -> tuple[int, int]:
        """Changes when memory that kernels were given is replaced."""
        return self.index.num_growths, self.arena.capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes of records and index."""
        return self.arena.allocated_bytes + self.index.allocated_bytes

    # Finding and making rows.

    def find(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Records of keys, -1 where there is none."""
        return self.index.find(keys, tables)

    def find_or_make(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Records of keys; missing ones are made with their first values."""
        records = self.index.find(keys, tables)
        if not self.has_spare(len(keys)):
            missing = int((records < 0).sum())  # waits for the card
            if not missing:
                return records
            self.index.reserve(missing)
            self.arena.reserve(self.index.most_records + missing)
        self._make_missing(keys, tables, records)
        self.index.ask(len(keys))
        return records

    def find_or_make_within(self, keys: Tensor, tables: Tensor) -> Tensor:
        """The same after `has_spare` and before `index.ask`: it waits for nothing and can be recorded."""
        records = self.index.find(keys, tables)
        self._make_missing(keys, tables, records)
        return records

    def _make_missing(self, keys: Tensor, tables: Tensor, records: Tensor) -> None:
        new, num_new = self.index.add_missing(keys, tables, records)
        self._write_initial(keys, tables, records, new, num_new, self.arena)

    def has_spare(self, count: int) -> bool:
        """Whether a batch fits however many of its keys are new; memory is made for that if it is little."""
        little = self._little()
        if not self.index.spare_for(count, little):
            return False
        needed = self.index.most_records + count
        if needed > self.arena.capacity:
            needed_bytes = (needed - self.arena.capacity) * self.arena.record_bytes
            if needed_bytes > max(little, _SPARE * self.arena.allocated_bytes):
                return False
            # Somewhat more, so that the next batches find room: what is recorded ends with its memory.
            more = min(needed // 4, little // self.arena.record_bytes)
            self.arena.reserve(needed + more)
        return True

    def _little(self) -> int:
        """Bytes that may be allocated for keys that may be new."""
        if self.device.type != "cuda":
            return _CHUNK_OF_HOST
        return int(_SPARE * torch.cuda.mem_get_info(self.device)[0])

    def _write_initial(
        self, keys: Tensor, tables: Tensor, records: Tensor, new: Tensor, num_new: Tensor, arena: DeviceArena
    ) -> None:
        block = rows_together(self.dim)
        row_kernels.write_initial[limited(grid_of(len(keys), block))](
            keys, tables, records, new, num_new, self._seeds, self._lows, self._steps, *arena.memory,
            self._first_state,
            DIM=self.dim, COLUMNS=columns_of(self.dim), STATE=arena.state_width,
            STATE_COLUMNS=columns_of(arena.state_width), SHIFT=arena.shift, BLOCK=block,
            enable_fp_fusion=_FUSES,
        )  # fmt: skip

    def initial(self, keys: Tensor, tables: Tensor) -> Tensor:
        """The values that rows would begin with."""
        made = DeviceArena(self.dim, 0, self.dtype, self.device)
        made.reserve(len(keys) + 1)
        records = torch.arange(len(keys), dtype=torch.int32, device=self.device)
        self.write_initial(keys, tables, records, made)
        return made.read(records.to(torch.int64))

    def write_initial(self, keys: Tensor, tables: Tensor, records: Tensor, arena: DeviceArena) -> None:
        """Give records the first values and state of rows."""
        every = torch.arange(len(keys), dtype=torch.int32, device=self.device)
        count = torch.full((1,), len(keys), dtype=torch.int64, device=self.device)
        self._write_initial(keys, tables, records, every, count, arena)

    # Pooling.

    def pool(self, records: Tensor, bags: Bags, spare: Tensor | None, out: Tensor) -> None:
        """Write the sum or mean of each bag to its columns of ``out``."""
        if not bags.num_bags:
            return
        together = rows_together(self.dim)
        row_kernels.pool[grid_of(bags.num_bags, together)](
            records, self._or(bags.offsets), self._or(bags.weights), *self.arena.memory[:2], self._or(spare),
            bags.columns, bags.is_mean, out, bags.num_bags, bags.num_samples, out.stride(0),
            DIM=self.dim, COLUMNS=columns_of(self.dim), SHIFT=self.arena.shift, ONE_EACH=bags.one_each,
            WEIGHTED=bags.weights is not None, HAS_SPARE=spare is not None, BAGS=together,
        )  # fmt: skip

    def weight_gradients(
        self, records: Tensor, bags: Bags, spare: Tensor | None, gradients: Tensor
    ) -> Tensor:
        """Gradients of the ids' weights."""
        out = torch.empty(bags.num_ids, dtype=self.dtype, device=self.device)
        if not bags.num_ids:
            return out
        together = rows_together(self.dim)
        row_kernels.weight_gradients[grid_of(bags.num_ids, together)](
            records, self._or(bags.bags), self._or(bags.offsets), *self.arena.memory[:2], self._or(spare),
            bags.columns, bags.is_mean, gradients, out, bags.num_ids, bags.num_samples, gradients.stride(0),
            DIM=self.dim, COLUMNS=columns_of(self.dim), SHIFT=self.arena.shift, ONE_EACH=bags.one_each,
            HAS_SPARE=spare is not None, BLOCK=together, enable_fp_fusion=_FUSES,
        )  # fmt: skip
        return out

    # Stepping.

    def step(
        self,
        records: Tensor,
        bags: Bags,
        gradients: Tensor,
        lr: float,
        number: int,
        *,
        same_bits: bool = False,
    ) -> None:
        """Sum the gradients of each row that a batch reads, and step it once.

        With ``same_bits`` a step by one gradient a row gives the bits of a CPU, a little slower.
        """
        if bags.num_ids:
            self.set_rates(lr, number)
            self._reduce(records, bags, gradients, self._rule, self.arena.memory, self.arena.shift, same_bits)

    def step_rows(self, records: Tensor, gradients: Tensor, lr: float, number: int) -> None:
        """Step records, which may repeat, by the sums of the gradients given for each; a CPU's bits."""
        self.step(records, self.one_bag_each(len(records)), gradients, lr, number, same_bits=True)

    def sum_rows(self, numbers: Tensor, count: int, bags: Bags, gradients: Tensor) -> Tensor:
        """Sum the gradients of a batch's ids by their numbers, below ``count``, in the order of a step."""
        sums = torch.zeros((max(count, 1), self.dim), dtype=self.dtype, device=self.device)
        if bags.num_ids:
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            memory = first, sums, first, sums
            self._reduce(numbers, bags, gradients, step_kernels.SUM, memory, _ONE_CHUNK, same_bits=True)
        return sums[:count]

    def one_bag_each(self, count: int) -> Bags:
        """Bags of one id each, whose vectors are rows of a matrix."""
        return Bags(count, count, None, None, self._one_column, self._no_mean)

    def _reduce(
        self,
        records: Tensor,
        bags: Bags,
        gradients: Tensor,
        rule: Any,
        memory: tuple[Tensor, Tensor, Tensor, Tensor],
        shift: int,
        same_bits: bool,
    ) -> None:
        """Sum gradients by record, and change each record by its sum."""
        settings = self._settings_there
        segments = Segments(records)
        together = rows_together(self.dim)
        options = {
            "DIM": self.dim,
            "COLUMNS": columns_of(self.dim),
            "ONE_EACH": bags.one_each,
            "WEIGHTED": bags.weights is not None,
            "enable_fp_fusion": _FUSES,
        }
        ids = (
            segments.ids, self._or(bags.bags), self._or(bags.offsets), self._or(bags.weights), bags.columns,
            bags.is_mean, gradients, bags.num_samples, gradients.stride(0),
        )  # fmt: skip
        step_kernels.step_short[grid_of(bags.num_ids, together)](
            segments.starts, segments.count, segments.records, *ids, *memory, settings,
            RULE=rule, SHIFT=shift, LONG=LONG, SEGMENTS=together, SAME_BITS=same_bits, **options,
        )  # fmt: skip
        if not segments.most_long:
            return
        partial = torch.empty((segments.most_pieces, self.dim), dtype=self.dtype, device=self.device)
        step_kernels.sum_pieces[limited((segments.most_pieces,))](
            segments.starts, segments.piece_segments, segments.first_pieces, segments.counters, *ids, partial,
            PIECE=PIECE, ROWS=min(together, PIECE), **options,
        )  # fmt: skip
        step_kernels.step_long[limited((segments.most_long,))](
            segments.starts, segments.long_segments, segments.first_pieces, segments.counters,
            segments.records, partial, *memory, settings,
            RULE=rule, DIM=self.dim, COLUMNS=columns_of(self.dim), SHIFT=shift, PIECE=PIECE,
            ROWS=min(together, PIECE), SAME_BITS=same_bits, enable_fp_fusion=_FUSES,
        )  # fmt: skip

    def set_rates(self, lr: float, number: int) -> None:
        """Put the rule's scalars of a step on the card."""
        settings = self.optimizer.settings(lr, number)
        if settings != self._settings:
            self._settings = settings
            there = torch.tensor([*settings, *[0.0] * (5 - len(settings))], dtype=torch.float64)
            if self.device.type == "cuda":
                there = there.pin_memory()
            self._settings_there.copy_(there, non_blocking=True)

    # Whole tables, as those of this process.

    packing = None  # rows on a card are whole
    row_dtype = "float32"

    @property
    def width(self) -> int:
        """Elements of a record."""
        return self.arena.width

    def readable(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return stored records as numbers: they are."""
        return stored

    def num_rows(self, table: int) -> int:
        """Count the rows of a table."""
        return self.index.num_keys(table)

    def blocks(self, table: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """All rows of a table, by key, as blocks of (keys, records) in host memory."""
        tables, keys, records = self.index.entries()
        here = tables == table
        keys, records = keys[here], records[here]
        for first in range(0, len(keys), _BLOCK_ROWS):
            some = slice(first, first + _BLOCK_ROWS)
            yield keys[some].cpu().numpy(), self.arena.read(records[some]).cpu().numpy()

    def load(self, table: int, keys: npt.NDArray[np.int64], contents: npt.NDArray[Any]) -> None:
        """Set rows of a table, known or not, to the given records; ``keys`` must differ."""
        there = torch.from_numpy(keys).to(self.device)
        tables = torch.full((len(keys),), table, dtype=torch.int32, device=self.device)
        records = self.find_or_make(there, tables).to(torch.int64)
        self.arena.write(
            records, torch.from_numpy(np.ascontiguousarray(contents)).to(self.device, self.dtype)
        )

    load_stored = load

    def _or(self, tensor: Tensor | None) -> Tensor:
        """Something to point at where a kernel reads nothing."""
        return self._nothing if tensor is None else tensor
