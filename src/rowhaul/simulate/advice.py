"""One sentence of advice from a comparison: which mechanism, on which workers, or one machine alone."""

from __future__ import annotations

from rowhaul.simulate.results import BEST_SUBSET, EQUAL, Outcome, Results


def advice(results: Results) -> str:
    """Say what to do, from the modelled iterations; without compute, only whose moves take least."""
    best = min(results.outcomes, key=lambda one: (one.iteration_seconds, one.cost_seconds))
    who = _who(best)
    alone = best.alone_seconds
    if not any(one.compute_seconds.any() for one in results.outcomes):
        return (
            f"Advice: transfers take least time with {who}. Whether more workers pay cannot be said without "
            "compute (--compute)."
        )
    took = f"{_time(best.iteration_seconds)} an iteration"
    if best.iteration_seconds < alone:
        faster = alone / best.iteration_seconds
        return f"Advice: use {who}: {took}, {faster:.1f} times as fast as one machine alone ({_time(alone)})."
    return (
        f"Advice: use one machine if it holds the tables: about {_time(alone)} an iteration alone. If it "
        f"does not, use {who}: {took}."
    )


def without_repeats(outcomes: tuple[Outcome, ...], reference: str) -> tuple[Outcome, ...]:
    """Leave out comparisons that are the mechanism itself: a best subset of all workers says nothing new."""
    shares = {one.name: one.shares for one in outcomes}
    return tuple(
        one
        for one in outcomes
        if one.name == reference
        or not one.name.endswith((BEST_SUBSET, EQUAL))
        or one.shares != shares[_mechanism(one)]
    )


def _mechanism(outcome: Outcome) -> str:
    return outcome.name.removesuffix(BEST_SUBSET).removesuffix(EQUAL)


def _who(outcome: Outcome) -> str:
    used = [worker for worker, share in enumerate(outcome.shares) if share]
    who = f"{outcome.dispatch} on all {len(used)} workers"
    if len(used) < len(outcome.shares):
        names = ", ".join(map(str, used))
        who = f"{outcome.dispatch} on {len(used)} of {len(outcome.shares)} workers ({names})"
    samples = [outcome.shares[worker] for worker in used]
    if max(samples) - min(samples) <= 1:  # as equal as a batch can be divided
        return who
    return f"{who} with --shares {','.join(map(str, outcome.shares))}"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"
