"""Moves counted by link, table and reason: every byte of the plans, with the reason a dictionary finds."""

from collections import Counter

import numpy as np
import pytest
from explain_cases import SAMPLES, TABLES, VALUES, plans
from in_process_cluster import run_cluster
from scripted_cases import script

from rowhaul.explain.reasons import Reason
from rowhaul.explain.traffic import Traffic
from rowhaul.schedule import HotRows, RowPolicy, Topology
from rowhaul.schedule.plan import Kind, Payload
from rowhaul.schedule.row_states import State

NAMED = ("kind", "payload", "table", "key", "source", "target", "num_bytes", "after")


class NaiveTraffic:
    """Counts moves one by one, with what happened to each row before in a dictionary."""

    def __init__(self):
        self.cells, self.rows = Counter(), {}
        self.evictions, self.repulled = Counter(), Counter()

    def add(self, plan):
        place = {row: at for at, row in enumerate(zip(plan.tables.tolist(), plan.keys.tolist(), strict=True))}
        pushed = {}
        columns = (getattr(plan.moves, name).tolist() for name in NAMED)
        for kind, payload, table, key, source, target, size, after in zip(*columns, strict=True):
            row = table, key
            state = plan.states[place[row]] if row in place and plan.move_rows is not None else State.HOME
            known = self.rows.setdefault(row, {"held": set(), "trained": None, "lost": {}})
            payload = payload if plan.move_rows is not None else Payload.VALUES
            reason = self._reason(kind, payload, after, state, known, target)
            self.cells[source, target, table, kind, reason] += np.array([1, size])
            if kind == Kind.EVICT_PUSH:
                pushed[row, source] = size
            elif reason == Reason.EVICTED:
                at, bytes_pushed = known["lost"][target]
                self.repulled[self.evictions[target] - at] += np.array([1, size + bytes_pushed])
        evicted = zip(
            *(one.tolist() for one in (plan.evicted_from, plan.evicted_tables, plan.evicted_keys)),
            strict=True,
        )
        for worker, table, key in evicted:
            row = table, key
            known = self.rows.setdefault(row, {"held": set(), "trained": None, "lost": {}})
            known["lost"][worker] = self.evictions[worker], pushed.get((row, worker), 0)
            self.evictions[worker] += 1
        for row, at in place.items():
            if plan.states[at] != State.NOT_ADMITTED:
                trainers = {w for w in range(64) if int(plan.trainers[at]) >> w & 1}
                known = self.rows.setdefault(row, {"held": set(), "trained": None, "lost": {}})
                known["held"] |= trainers
                known["trained"] = None if plan.states[at] == State.REPLICATED else trainers
                known["lost"] = {}
        for row in zip(plan.forgotten_tables.tolist(), plan.forgotten_keys.tolist(), strict=True):
            self.rows.pop(row, None)

    def _reason(self, kind, payload, after, state, known, target):
        if kind == Kind.EVICT_PUSH:
            return Reason.SPLIT if payload & Payload.GRADIENT else Reason.EVICTED
        if after:
            return Reason.SYNC
        if state in (State.SPLIT, State.OWNED):
            return Reason.SPLIT if state == State.SPLIT else Reason.TRAINED_ELSEWHERE
        if kind != Kind.MISS_PULL:
            return Reason.SYNC
        if target not in known["held"]:
            return Reason.FIRST_USE
        if known["trained"] is None:
            return Reason.HOT
        if target not in known["trained"]:
            return Reason.TRAINED_ELSEWHERE
        if len(known["trained"]) > 1:
            return Reason.SPLIT
        return Reason.EVICTED if target in known["lost"] else Reason.SYNC


HOT = HotRows(np.array([0, 1], np.int32), np.array([0, 1]))
CASES = {
    "on demand": {},
    "peer to peer": {"topology": Topology(num_workers=3, num_stores=1, peer_to_peer=True)},
    "co-located": {"topology": Topology(num_workers=3, colocated=True), "dispatcher": "laia"},
    "full": {"sync": "full"},
    "static": {"sync": "static", "hot": HOT},
    "bounded": {"sync": "bounded:1"},
    "paper counts": {"first_touch": False, "dispatcher": "round-robin"},
    "hot rows": {"hot": HOT},
    "hot rows leave": {"hot": HOT, "replacement": HotRows(np.array([2], np.int32), np.array([0]))},
    "policies": {"policies": (RowPolicy(admit_after=2), RowPolicy(ttl=3), RowPolicy(max_rows=9))},
}


@pytest.mark.parametrize("case", CASES)
def test_every_move_is_counted_with_its_reason(case):
    found = list(plans(**CASES[case]))
    num_ranks = 6
    traffic, naive = Traffic(num_ranks, range(TABLES)), NaiveTraffic()
    for plan in found:
        traffic.add(plan)
        naive.add(plan)
    by_link, by_table = np.zeros_like(traffic.by_link), np.zeros_like(traffic.by_table)
    crossed = np.zeros_like(traffic.of_link_and_table)
    for (source, target, table, kind, reason), counts in naive.cells.items():
        by_link[source * num_ranks + target, kind, reason] += counts
        by_table[table, kind, reason] += counts
        crossed[source * num_ranks + target, table] += counts[1]
    np.testing.assert_array_equal(traffic.by_link, by_link)
    np.testing.assert_array_equal(traffic.by_table, by_table)
    np.testing.assert_array_equal(traffic.of_link_and_table, crossed)
    np.testing.assert_array_equal(traffic.num_evictions[:3], [naive.evictions[w] for w in range(3)])
    repulled = np.zeros_like(traffic.repulled)
    for distance, counts in naive.repulled.items():
        repulled[max(0, distance - 1).bit_length()] += counts
    np.testing.assert_array_equal(traffic.repulled, repulled)
    reasons = {reason for *_, reason in naive.cells}
    wanted = {
        "on demand": {Reason.FIRST_USE, Reason.TRAINED_ELSEWHERE, Reason.EVICTED, Reason.SPLIT},
        "full": {Reason.SYNC, Reason.SPLIT},
        "hot rows leave": {Reason.HOT},
    }
    assert wanted.get(case, set()) <= reasons


@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_plans(case):
    found = list(plans(**CASES[case]))
    traffic = Traffic(6, range(TABLES))
    for plan in found:
        traffic.add(plan)
    rows = sum(plan.counts()[0].sum(axis=1) for plan in found)
    num_bytes = sum(plan.counts()[1].sum(axis=1) for plan in found)
    for part in (traffic.by_link.sum(axis=0), traffic.by_table.sum(axis=0), traffic.by_kind()):
        np.testing.assert_array_equal(part.sum(axis=1), np.stack([rows, num_bytes], axis=1))
    assert traffic.of_link_and_table.sum() == num_bytes.sum()
    links = Counter()
    for plan in found:
        for source, target, size in zip(
            plan.moves.source, plan.moves.target, plan.moves.num_bytes, strict=True
        ):
            links[source * 6 + target] += size
    assert traffic.by_link[..., 1].sum(axis=(1, 2)).tolist() == [links[one] for one in range(36)]
    assert traffic.samples.sum() == len(found) * SAMPLES
    assert (traffic.hits, traffic.lookups) == (
        sum(plan.hits.sum() for plan in found),
        sum(plan.lookups.sum() for plan in found),
    )


@pytest.mark.parametrize("peer_to_peer", [False, True])
def test_links_carry_what_was_counted(peer_to_peer):
    rows = [{0: "ab", 1: "bc", 2: "d"}, {0: "cd", 1: "ae", 2: "bf"}, {0: "ef", 1: "ab", 2: "c"}]
    case = script(*rows * 3, capacity=4, peer_to_peer=peer_to_peer, segments=(4, None))
    outcome = run_cluster(case)
    traffic = Traffic(4, range(len(case.tables)))
    for plan in outcome.plans:
        traffic.add(plan)
    counted = traffic.by_link[..., 1].sum(axis=(1, 2))
    posted = {link: total for link, total in outcome.posted.items() if total}
    assert {divmod(link, 4): counted[link] for link in np.flatnonzero(counted).tolist()} == posted
    assert posted


def test_a_small_memory_forgets_rows_and_still_counts_every_byte():
    found = list(plans(40))
    whole, small = Traffic(6, range(TABLES)), Traffic(6, range(TABLES), most_entries=32)
    for plan in found:
        whole.add(plan)
        small.add(plan)
    assert whole.num_forgotten == 0
    assert small.num_forgotten > 0
    np.testing.assert_array_equal(small.by_link.sum(axis=2), whole.by_link.sum(axis=2))
    first = small.by_kind()[:, Reason.FIRST_USE, 0].sum()
    assert first >= whole.by_kind()[:, Reason.FIRST_USE, 0].sum()


def test_rows_that_policies_drop_are_not_counted_as_forgotten():
    policy = RowPolicy(ttl=2)
    traffic = Traffic(6, range(TABLES))
    for plan in plans(40, policies=(policy,) * TABLES):
        traffic.add(plan)
        assert traffic.num_remembered == (traffic._entries["table"] >= 0).sum()
    assert traffic.num_forgotten == 0
    assert (traffic._names == 1).any()  # places of rows that were dropped


def test_growing_loses_nothing():
    found = list(plans(40))
    at_once, grown = Traffic(6, range(TABLES)), Traffic(6, range(TABLES))
    grown._names, grown._entries = grown._names[:64].copy(), grown._entries[:64].copy()
    for plan in found:
        at_once.add(plan)
        grown.add(plan)
    assert len(grown._entries) > 64
    np.testing.assert_array_equal(at_once.by_link, grown.by_link)


def test_rows_worth_replicating_move_more_than_their_sums():
    found = list(plans(40, dispatcher="round-robin"))
    traffic = Traffic(6, range(TABLES))
    moved, trained = Counter(), Counter()
    for plan in found:
        traffic.add(plan)
        rows = zip(plan.moves.table.tolist(), plan.moves.key.tolist(), strict=True)
        for row, size in zip(rows, plan.moves.num_bytes.tolist(), strict=True):
            moved[row] += size
        trained.update(zip(plan.tables.tolist(), plan.keys.tolist(), strict=True))
    summed = {row: trained[row] * VALUES[row[0]] * 2 * 2 for row in moved}
    chosen = [row for row in moved if moved[row] > summed[row]]
    assert traffic.worth_replicating(VALUES, 3) == {
        "rows": len(chosen),
        "moved": sum(moved[row] for row in chosen),
        "summed": sum(summed[row] for row in chosen),
    }


def test_chunks_of_a_pruned_table_count_for_it():
    traffic, folded = Traffic(6, range(TABLES)), Traffic(6, (0, 0, 1))
    for plan in plans(10):
        traffic.add(plan)
        folded.add(plan)
    np.testing.assert_array_equal(folded.by_table[0], traffic.by_table[0] + traffic.by_table[1])
    np.testing.assert_array_equal(folded.by_table[1], traffic.by_table[2])
