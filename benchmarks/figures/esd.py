"""ESD's figures 4 to 6, redone: cost and speed-up over LAIA with fast and slow links, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from figures import plots
from figures.lab import FAE, HET, JOINT, LAIA, Lab, Result, Setting, esd
from figures.published import ESD
from figures.sections import Section, Show, Table, milliseconds, percent, span, times
from figures.traces import Trace

FAST, SLOW = 5.0, 0.5  # Gbit/s
DEFAULT = Setting(links_gbit=(FAST,) * 4 + (SLOW,) * 4, per_worker=128, dim=512, cache=0.08)
ALPHAS = (1, 0.5, 0.25, 0.125, 0)
THREE = tuple(esd(alpha) for alpha in (1, 0.5, 0))  # those of most figures
COMPARED = (LAIA, *THREE, JOINT)
KIND_LABELS = {"miss_pull": "miss pull", "update_push": "update push", "evict_push": "evict push"}


class Workload:
    """A trace and the papers' name for it."""

    def __init__(self, label: str, trace: Trace, in_paper: bool) -> None:
        self.label, self.trace, self.in_paper = f"{label} {trace.name}".strip(), trace, in_paper


def reduction(result: Result, reference: Result) -> float:
    return 1 - result.cost_seconds / reference.cost_seconds


def speed_up(result: Result, reference: Result) -> float:
    return reference.iteration_seconds / result.iteration_seconds


def figure_4(lab: Lab, workloads: Sequence[Workload], out: Path) -> Section:
    """Cost and speed-up of every mechanism, the links as they are."""
    mechanisms = (HET, FAE, *COMPARED)
    fast_only = Setting((FAST,) * 4, 2 * DEFAULT.per_worker, DEFAULT.dim, DEFAULT.cache)
    rows: list[list[str]] = []
    reductions: dict[str, list[float]] = {}
    speed_ups: dict[str, list[float]] = {}
    for workload in workloads:
        laia = lab.run(workload.trace, LAIA, DEFAULT)
        results = {one.name: lab.run(workload.trace, one, DEFAULT) for one in mechanisms}
        results["LAIA, fast 4 alone"] = lab.run(workload.trace, LAIA, fast_only)
        for name, result in results.items():
            reductions.setdefault(name, []).append(reduction(result, laia))
            speed_ups.setdefault(name, []).append(speed_up(result, laia))
            rows.append(
                [
                    f"{workload.label}, {name}",
                    milliseconds(result.cost_seconds),
                    percent(reduction(result, laia)),
                    milliseconds(result.slowest_link_seconds),
                    milliseconds(result.iteration_seconds),
                    times(speed_up(result, laia)),
                ]
            )
    labels = [workload.label for workload in workloads]

    def of(values: dict[str, list[float]], *names: str, in_paper: bool = True) -> list[float]:
        chosen = [number for number, workload in enumerate(workloads) if workload.in_paper == in_paper]
        return [values[name][number] for name in names for number in chosen]

    def here(values: dict[str, list[float]], *names: str, show: Show = percent) -> str:
        outside = span(of(values, *names, in_paper=False), show)
        return f"S1-S3: {span(of(values, *names), show)}; MovieLens: {outside}"

    shown = {
        name: values for name, values in reductions.items() if name not in (HET.name, FAE.name, LAIA.name)
    }
    panels = [
        plots.Panel(
            "ESD, figure 4a: speed-up over LAIA",
            labels,
            speed_ups,
            ylabel="times as fast",
            stated=(1.03, 1.74),
        ),
        plots.Panel(
            "ESD, figure 4b: cost below LAIA", labels, shown, ylabel="share saved", stated=(0.0703, 0.3676)
        ),
    ]
    behind = max(of(speed_ups, HET.name, FAE.name))
    return Section(
        "esd-04",
        "ESD, figure 4: every mechanism",
        "Eight workers, four links of 5 Gbps and four of 0.5, 128 samples a worker, dim 512, "
        "8 % of the rows cached.",
        [
            Table(
                ["", "cost, ms", "below LAIA", "slowest link, ms", "iteration, ms", "speed-up over LAIA"],
                rows,
            )
        ],
        [
            (ESD["speed-up"], here(speed_ups, *(one.name for one in THREE), show=times)),
            *((ESD[f"reduction:{alpha}"], here(reductions, esd(alpha).name)) for alpha in (1, 0.5, 0)),
            (ESD["baselines"], f"at best {times(behind)} of LAIA's speed"),
        ],
        plots=[plots.save(out / "esd-04.png", panels)],
    )


def figure_5(lab: Lab, workloads: Sequence[Workload], out: Path) -> Section:
    """Hit ratios, and the moved rows by kind and class of links."""
    rows, pulled, evicted = [], [], []
    hits: dict[str, list[float]] = {}
    fast_shares: dict[str, list[float]] = {}
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for workload in workloads:
        for mechanism in COMPARED:
            result = lab.run(workload.trace, mechanism, DEFAULT)
            parts = composition(result)
            shares.setdefault(workload.label, {})[mechanism.name] = parts
            hits.setdefault(mechanism.name, []).append(result.hit_ratio)
            fast = sum(share for name, share in parts.items() if name.startswith("5 Gbps"))
            fast_shares.setdefault(mechanism.name, []).append(fast)
            if workload.in_paper and mechanism is not JOINT:
                evicted.append(sum(share for name, share in parts.items() if name.endswith("evict push")))
            origins = [result.pulls_by_state[state] / result.pulls for state in ("SPLIT", "HOME")]
            pulled.append(
                [f"{workload.label}, {mechanism.name}", *map(percent, (*origins, 1 - sum(origins)))]
            )
            rows.append(
                [
                    f"{workload.label}, {mechanism.name}",
                    percent(result.hit_ratio),
                    *(percent(share) for share in parts.values()),
                    percent(fast),
                ]
            )
    names = list(next(iter(next(iter(shares.values())).values())))
    paper = [number for number, workload in enumerate(workloads) if workload.in_paper]

    def over_laia(values: dict[str, list[float]]) -> str:
        return span([values[one.name][i] - values[LAIA.name][i] for one in THREE for i in paper])

    panel = plots.Panel(
        "ESD, figure 5a: hit ratio", [w.label for w in workloads], hits, ylabel="hits of lookups"
    )
    return Section(
        "esd-05",
        "ESD, figure 5: hit ratio and what is moved",
        "As figure 4. Shares of all rows moved; below, where the latest version of the pulled rows was: on "
        "several workers as partial gradients, at the store (never seen before, or evicted), or on another "
        "worker.",
        [
            Table(["", "hits", *names, "5 Gbps, all"], rows),
            Table(["pulled rows", "split", "at the store", "on another worker"], pulled),
        ],
        [
            (ESD["hits"], f"ESD's minus LAIA's: {over_laia(hits)}"),
            (
                ESD["fast share LAIA"],
                f"share of the fast links: {span([fast_shares[LAIA.name][i] for i in paper])}",
            ),
            (ESD["fast share ESD"], f"ESD's minus LAIA's: {over_laia(fast_shares)}"),
            (ESD["evict share"], f"evict pushes {span(evicted)}"),
        ],
        plots=[
            plots.save(out / "esd-05a.png", [panel]),
            plots.save_compositions(out / "esd-05b.png", shares),
        ],
    )


def composition(result: Result) -> dict[str, float]:
    """Share of the moved rows by class of links and kind, the fast links first."""
    total = sum(sum(per_worker) for per_worker in result.rows.values())
    links = result.setting.links_gbit
    return {
        f"{speed:g} Gbps {label}": sum(
            count for count, link in zip(result.rows[kind], links, strict=True) if link == speed
        )
        / total
        for speed in sorted(set(links), reverse=True)
        for kind, label in KIND_LABELS.items()
    }


def figure_6(lab: Lab, workloads: Sequence[Workload], out: Path) -> Section:
    """Cost and the decision's processor time against α."""
    rows, panels = [], []
    saved: dict[tuple[str, int, float], float] = {}
    for per_worker in (128, 256):
        setting = DEFAULT.but(per_worker=per_worker)
        lines, seconds = {}, {}
        for workload in workloads:
            laia = lab.run(workload.trace, LAIA, setting)
            results = [
                lab.run(workload.trace, mechanism, setting) for mechanism in (*map(esd, ALPHAS), JOINT)
            ]
            for alpha, result in zip(ALPHAS, results, strict=False):
                saved[workload.label, per_worker, alpha] = reduction(result, laia)
            lines[workload.label] = [reduction(result, laia) for result in results[:-1]]
            seconds[workload.label] = [result.dispatch_cpu_ms for result in results[:-1]]
            rows.append(
                [
                    f"{workload.label}, m = {per_worker}, below LAIA",
                    *(percent(reduction(one, laia)) for one in results),
                ]
            )
            rows.append(
                [
                    f"{workload.label}, m = {per_worker}, CPU-ms",
                    *(f"{one.dispatch_cpu_ms:.2f}" for one in results),
                ]
            )
        panels.append(
            plots.Panel(
                f"ESD, figure 6: cost below LAIA, m = {per_worker}",
                ALPHAS,
                lines,
                "α",
                "share saved",
                kind="lines",
            )
        )
        panels.append(
            plots.Panel(f"CPU time of a decision, m = {per_worker}", ALPHAS, seconds, "α", "ms", kind="lines")
        )
    labels = [workload.label for workload in workloads if workload.in_paper]
    steps = [
        saved[label, m, ALPHAS[place]] - saved[label, m, ALPHAS[place + 1]]
        for label in labels
        for m in (128, 256)
        for place in range(len(ALPHAS) - 1)
    ]
    return Section(
        "esd-06",
        "ESD, figure 6: cost against the effort of deciding",
        "As figure 4, with 128 and 256 samples a worker. The paper shows the GPU's use by the CUDA solver; "
        "here the decision runs on one core, so its processor time an iteration (dispatch alone, median) "
        "stands in its place.",
        [Table(["", *(f"α = {alpha}" for alpha in ALPHAS), "joint"], rows)],
        [
            (ESD["alpha"], f"larger α lower in {sum(step > 0 for step in steps)} of {len(steps)} steps"),
            (ESD["alpha:0"], span([saved[label, m, 0] for label in labels for m in (128, 256)])),
            (ESD["reduction m=256"], f"up to {percent(max(saved[label, 256, 1] for label in labels))}"),
            (ESD["S1 m=256"], f"{percent(saved[labels[0], 256, 1])}, {percent(saved[labels[0], 256, 0.5])}"),
            (ESD["gpu"], "no GPU is used"),
        ],
        plots=[plots.save(out / "esd-06.png", panels)],
    )
