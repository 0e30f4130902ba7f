"""Pruning as one would write it without a thought for speed: a dictionary of rows, NumPy, plain loops.

Only the numbers that must agree bit for bit are borrowed: first values (from unpruned tables), the hashes and
draws by counter, and the estimate of rows that were forgotten.
"""

import math

import numpy as np

from rowhaul.optim import Adagrad, Adam, RowwiseAdagrad
from rowhaul.pruning.deciding.decision import FAR_BELOW
from rowhaul.pruning.deciding.hashing import DistinctCounter, draws_below, mixed, salt_of
from rowhaul.pruning.deciding.room import INDEX_BYTES


class Row:
    def __init__(self, num_chunks, now):
        self.chunks = [None] * num_chunks  # (values, state) or None
        self.utilities = [np.float32(0)] * num_chunks  # by gradient
        self.count = 0  # by access
        self.touched = now


class SlowPruning:
    """``first_values(table, key)`` is a whole row; ``row_hash(table, key)`` its 64-bit hash."""

    def __init__(
        self, settings, dim, optimizer, dtype, seed, least_entries, first_values, row_hash, num_tables
    ):
        self.settings, self.dim, self.optimizer, self.dtype, self.seed = settings, dim, optimizer, dtype, seed
        self.least_entries, self.first_values, self.row_hash = least_entries, first_values, row_hash
        self.rows = {}
        self.columns = [list(range(dim)) for _ in range(num_tables)]
        self.sums = np.zeros((num_tables, dim))
        self.is_open = bool(settings.dims)
        self.counter = DistinctCounter()
        self.num_rows = 0
        self.is_complete = True
        self.now = self.pruned_at = self.rows_pruned = self.turned_away = 0
        self.decisions = []

    # Sizes

    def pieces(self):
        return np.array_split(np.arange(len(self.columns[0])), self.settings.chunks)

    def chunk_bytes(self):
        widest = max(len(piece) for piece in self.pieces())
        return (widest + self.optimizer.state_width(widest)) * np.dtype(self.dtype).itemsize

    def room(self):
        """Chunks and entries that may be held."""
        if self.settings.budget:
            utilities = 1 if self.settings.utility == "access" else self.settings.chunks
            entry = 4 * (self.settings.chunks + utilities + 1)
            count = self.settings.budget // (self.chunk_bytes() + entry + INDEX_BYTES)
            return count, count
        kept = 1 - self.settings.ratio
        return (
            math.floor(kept * self.settings.chunks * self.num_rows + 1e-6),
            max(self.least_entries, math.ceil(math.sqrt(kept) * self.num_rows)),
        )

    def num_present(self):
        return sum(chunk is not None for row in self.rows.values() for chunk in row.chunks)

    # Reading

    def read(self, batch):
        """Rows of a batch, a list of (table, key) with repetitions; {(table, key): whole row}."""
        counts = {}
        for name in batch:
            counts[name] = counts.get(name, 0) + 1
        new = [name for name in counts if name not in self.rows]
        if new:
            self.add_new(new, counts)
        for name, times in counts.items():
            if name in self.rows and self.settings.utility == "access":
                row = self.rows[name]
                row.count = min(
                    decayed_count(row, self.settings.decay, self.now + 1) + 4096 * times, 2**32 - 1
                )
                row.touched = self.now + 1
        return {name: self.whole_row(name) for name in counts}

    def whole_row(self, name):
        whole = np.zeros(self.dim, self.dtype)
        if name in self.rows:
            for piece, chunk in zip(self.pieces(), self.rows[name].chunks, strict=True):
                if chunk is not None:
                    whole[np.array(self.columns[name[0]])[piece]] = chunk[0]
        return whole

    def add_new(self, new, counts):
        hashes = np.array([self.row_hash(*name) for name in new], dtype=np.uint64)
        for hashed in map(int, hashes):  # HyperLogLog: each register keeps the longest run of zeros, and one
            register, rank = hashed >> 50, 51 - (hashed & (2**50 - 1)).bit_length()
            self.counter.registers[register] = max(self.counter.registers[register], rank)
        if self.is_complete:
            self.num_rows = len(self.rows) + len(new)
        else:
            self.num_rows = max(self.num_rows, self.counter.estimate())
        drawn = mixed(hashes ^ salt_of(self.seed, self.now))
        by_reads = sorted(range(len(new)), key=lambda i: (-counts[new[i]], drawn[i]))
        room = self.room()[1] - len(self.rows)
        if len(new) > room:
            self.is_complete = False
            self.turned_away += len(new) - max(room, 0)
            by_reads = by_reads[: max(room, 0)]
        for i in by_reads:
            self.rows[new[i]] = Row(self.settings.chunks, self.now)
        free = self.room()[0] - self.num_present()
        for i in by_reads:
            for place in range(self.settings.chunks):
                if free > 0:
                    self.admit(new[i], place)
                    free -= 1

    def admit(self, name, place):
        columns = np.array(self.columns[name[0]])[self.pieces()[place]]
        values = self.first_values(*name)[columns].astype(self.dtype)
        width = self.optimizer.state_width(len(columns))
        self.rows[name].chunks[place] = values, np.full(width, self.optimizer.initial_state, self.dtype)

    # Learning

    def step(self, gradients, counts, lr, number):
        """One step: {(table, key): gradient of the whole row} and how often each was read."""
        for name, gradient in gradients.items():
            if self.is_open:
                for column in range(self.dim):
                    self.sums[name[0], column] += float(gradient[column]) * float(gradient[column])
            if name not in self.rows:
                continue
            row = self.rows[name]
            by_gradient = self.settings.utility == "gradient"
            kept = power(self.settings.decay, number - row.touched)
            if by_gradient:
                row.touched = number
            for place, piece in enumerate(self.pieces()):
                part = gradient[np.array(self.columns[name[0]])[piece]]
                if by_gradient:
                    amount = float(counts[name]) * norm(part)
                    row.utilities[place] = np.float32(kept * float(row.utilities[place]) + amount)
                if row.chunks[place] is not None:
                    row.chunks[place] = step_chunk(self.optimizer, *row.chunks[place], part, lr, number)
        self.now = number
        if self.is_open and number >= self.settings.cold_start:
            self.shrink()
        period = self.settings.period
        grown = self.turned_away and self.num_rows >= 2 * self.rows_pruned
        early = grown and number < period and number % max(1, period // 10) == 0
        if early or number % period == 0:
            self.prune()

    def shrink(self):
        self.is_open = False
        before = self.pieces()
        columns = [
            sorted(sorted(range(self.dim), key=lambda c: (-sums[c], c))[: self.settings.dims])
            for sums in self.sums
        ]
        one_number = isinstance(self.optimizer, RowwiseAdagrad)
        for (table, key), row in self.rows.items():
            old, row.chunks = row.chunks, [None] * self.settings.chunks
            place_of = {int(c): (place, i) for place, piece in enumerate(before) for i, c in enumerate(piece)}
            for place, piece in enumerate(np.array_split(np.array(columns[table]), self.settings.chunks)):
                if old[place] is None:
                    continue
                values, states = [], []
                for column in piece.tolist():
                    source, at = place_of[column]
                    if old[source] is None:
                        values.append(self.first_values(table, key)[column])
                        width = 1 if one_number else self.optimizer.state_width(1)
                        states.append([self.optimizer.initial_state] * width)
                    else:
                        values.append(old[source][0][at])
                        state, size = old[source][1], len(before[source])
                        states.append([state[0]] if one_number else [*state[at::size]])
                state = np.array(states, dtype=self.dtype).T  # planes x columns
                state = state.mean(axis=1, dtype=self.dtype) if one_number else state.reshape(-1)
                row.chunks[place] = np.array(values, dtype=self.dtype), state
        self.columns = columns

    def prune(self):
        names = sorted(self.rows, key=lambda name: self.row_hash(*name))
        decay, num_chunks = self.settings.decay, self.settings.chunks
        if self.settings.utility == "access":
            utilities = {
                (name, k): decayed_count(self.rows[name], decay, self.now)
                for name in names
                for k in range(num_chunks)
            }
        else:
            utilities = {
                (name, k): np.float32(power(decay, self.now - self.rows[name].touched) * float(u))
                for name in names
                for k, u in enumerate(self.rows[name].utilities)
            }
        present = {
            (name, k) for name in names for k in range(num_chunks) if self.rows[name].chunks[k] is not None
        }
        capacity, limit = self.room()
        evict, admit, forget = slow_decide(
            names, utilities, present, self.settings, capacity, limit, self.num_rows, self.seed, self.now
        )
        for name, place in evict:
            self.rows[name].chunks[place] = None
        for name, place in admit:
            self.admit(name, place)
        for name in forget:
            del self.rows[name]
            self.is_complete = False
        self.decisions.append((set(evict), set(admit), set(forget)))
        self.pruned_at, self.rows_pruned, self.turned_away = self.now, self.num_rows, 0


def slow_decide(names, utilities, present, settings, capacity, limit, num_rows, seed, iteration):
    """Names come by hash, by which ties are broken; chunks are (name, place)."""
    num_chunks = settings.chunks
    chunks = [(name, k) for name in names for k in range(num_chunks)]
    order = {chunk: number for number, chunk in enumerate(chunks)}
    threshold = dict(zip(range(num_chunks), [-math.inf] * num_chunks, strict=True))
    if names and settings.ratios == "adaptive":
        values = [float(utilities[chunk]) for chunk in chunks]
        cut = quantile(values, max(0.0, 1 - capacity / len(chunks)), settings.sample, seed, iteration)
        threshold = dict.fromkeys(range(num_chunks), cut)
    elif names:
        everything = max(num_rows, len(names))
        ratio = max(0.0, 1 - capacity / (everything * num_chunks))
        for k, pruned in enumerate(slow_ratios(settings.ratios, ratio, num_chunks)):
            values = [float(utilities[name, k]) for name in names]
            share = max(0.0, 1 - (1 - pruned) * everything / len(names))
            threshold[k] = quantile(values, share, max(1, settings.sample // num_chunks), seed + k, iteration)
    below = [chunk for chunk in chunks if float(utilities[chunk]) < threshold[chunk[1]]]
    above = [chunk for chunk in chunks if float(utilities[chunk]) > threshold[chunk[1]]]
    losers = [chunk for chunk in below if chunk in present]
    wanted = sorted(
        (chunk for chunk in above if chunk not in present), key=lambda c: (-utilities[c], order[c])
    )
    evict, admit = [], []
    if len(losers) + len(wanted) > settings.enforcement * len(chunks):
        evict, losers = losers, []
    losers = sorted(losers, key=lambda c: (utilities[c], order[c]))
    for chunk in wanted:
        if len(present) - len(evict) + len(admit) < capacity:
            admit.append(chunk)
        elif losers:
            evict.append(losers.pop(0))
            admit.append(chunk)
    after = (present - set(evict)) | set(admit)
    best = {name: max(float(utilities[name, k]) for k in range(num_chunks)) for name in names}
    empty = [name for name in names if not any((name, k) in after for k in range(num_chunks))]
    lowest = min(threshold.values(), default=-math.inf)
    forget = [name for name in empty if best[name] <= FAR_BELOW * lowest]
    for name in sorted(set(empty) - set(forget), key=lambda name: (best[name], order[name, 0])):
        if len(names) - len(forget) > limit // 2:
            forget.append(name)
    return evict, admit, forget


def slow_ratios(shape, ratio, num_chunks):
    x = [(k + 0.5) / num_chunks for k in range(num_chunks)]
    if shape == "linear":
        return [ratio + 2 * (one - 0.5) * min(ratio, 1 - ratio) / 2 for one in x]
    cap = max(0.95, ratio)
    low, high = 0.0, cap / x[0] ** 0.5
    for _ in range(200):
        c = (low + high) / 2
        if np.minimum(cap, c * np.array(x) ** 0.5).mean() < ratio:
            low = c
        else:
            high = c
    return [min(cap, high * one**0.5) for one in x]


def quantile(values, share, size, seed, iteration):
    if len(values) > size:
        values = [values[i] for i in draws_below(len(values), size, seed, iteration)]
    position = min(int(share * len(values)), len(values) - 1)
    return sorted(values)[position] if position else -math.inf


def decayed_count(row, decay, now):
    """A count of accesses as it is after so many steps without one."""
    small, large = (math.floor(power(decay, some) * 2**32) for some in split(now - row.touched))
    return (row.count * small >> 32) * large >> 32


def split(steps):
    return steps % 1024, steps // 1024 * 1024


def power(base, exponent):
    """Multiplied up one by one, thousands first."""
    small, thousand, large = 1.0, base, 1.0
    for _ in range(exponent % 1024):
        small *= base
    for _ in range(1023):
        thousand *= base
    for _ in range(exponent // 1024):
        large *= thousand
    return small * large


def norm(part):
    part = [float(x) for x in part]
    whole = len(part) // 4 * 4
    lanes = [sum((x * x for x in part[lane:whole:4]), 0.0) for lane in range(4)]
    total = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    for x in part[whole:]:
        total += x * x
    return float(np.sqrt(total))


def step_chunk(rule, values, state, gradient, lr, number):
    """A chunk steps as a row of its own size does."""
    w, s = values.copy(), state.copy()
    g = gradient + w.dtype.type(rule.weight_decay) * w
    size = len(w)
    if isinstance(rule, RowwiseAdagrad):
        s[0] += (g * g).sum() / size
        w -= lr / (np.sqrt(s[0]) + rule.eps) * g
    elif isinstance(rule, Adagrad):
        s += g * g
        w -= lr * g / (np.sqrt(s) + rule.eps)
    elif isinstance(rule, Adam):
        mean, square = s[:size], s[size:]
        mean[:] = rule.beta1 * mean + (1 - rule.beta1) * g
        square[:] = rule.beta2 * square + (1 - rule.beta2) * g * g
        rate = lr * (1 - rule.beta2**number) ** 0.5 / (1 - rule.beta1**number)
        w -= rate * mean / (np.sqrt(square) + rule.eps)
    else:
        w -= lr * g
    return w, s
