"""A run in words: the sentences that open its page, and the numbers in its tiles."""

from __future__ import annotations

from math import isfinite
from statistics import median_high

from rowhaul._quantities import bytes_text, seconds_text
from rowhaul.explain.advice import one_machine_text
from rowhaul.explain.summary import (
    advice_texts,
    left_out_text,
    moved_text,
    parts_text,
    reasons_text,
    tables_text,
    time_text,
    waits_text,
)
from rowhaul.report.reading import RunRecord

_ADVICE = 2


def sentences(run: RunRecord) -> list[str]:
    """Return what there is to say, the most important first."""
    found = run.findings
    said = [_what(run)]
    if found is not None:
        said.append(one_machine_text(found))
        said.append(f"On average {time_text(found)}." if time_text(found) else "")
        said.append(f"The links carry {moved_text(found)}.")
        why = reasons_text(found)
        said.append(f"Rows move because: {why}." if why else "")
        waits = waits_text(found)
        said.append(f"Training waits most for rows of {waits}." if waits else "")
        left_out = left_out_text(found)
        said.append(f"Left out, without a share: {left_out}." if left_out else "")
        tables = tables_text(found)
        said.append(f"The tables that move most bytes an iteration: {tables}." if tables else "")
        said += advice_texts(found, _ADVICE)
    elif run.detail is not None:
        said.append(f"On average {parts_text(run.detail['seconds'])}. One process: no rows move.")
    return [one for one in said if one]


def _what(run: RunRecord) -> str:
    lines, model = run.lines("train"), run.config.get("model", {}).get("name", "a model")
    where = "in one process"
    if run.findings is not None:
        workers = run.findings.num_workers
        stores = len(run.findings.roles) - workers
        where = f"on {workers} worker{'s' * (workers > 1)}" + (
            f" and {stores} store{'s' * (stores > 1)}" if stores else ""
        )
    elif run.is_cluster:
        where = "on a cluster"
    text = f"{model} trained {where}, {run.step:,} steps"
    if lines and lines[-1]["step"] == run.step:
        text += f" and {lines[-1]['samples']:,} samples"
    if speed := _median_speed(run):
        text += f", at {speed:,.0f} samples a second"
    if quality := _quality(run):
        text += "; " + " and ".join(f"{name} {value:.4f}" for name, value in quality)
    return f"{text}."


def _quality(run: RunRecord) -> list[tuple[str, float]]:
    """Return what the last evaluation found, which is an RMSE where the label is a number."""
    evaluated = run.lines("eval")
    if not evaluated:
        return []
    last = evaluated[-1]
    found = [(name, last[key]) for name, key in (("AUC", "auc"), ("log loss", "log_loss"))]
    found += [(f"RMSE of {key.removesuffix('/rmse')}", last[key]) for key in last if key.endswith("/rmse")]
    return [(name, value) for name, value in found if value is not None and isfinite(value)]


def _median_speed(run: RunRecord) -> float:
    """Return samples a second; 0 if none was logged."""
    speeds = [line["samples_per_second"] for line in run.lines("train") if line["samples_per_second"]]
    return median_high(speeds) if speeds else 0.0


def missing(run: RunRecord) -> list[str]:
    """Say what the page lacks, and how to get it."""
    said = []
    if not run.is_finished:
        said.append(
            f"The run has not finished, or was killed: this page shows what there is up to step {run.step:,}."
        )
    if run.detail is None:
        said.append(
            "The run was trained without --explain, or has not come to its first report: there is no "
            "timeline, nothing on who waited for whom, why rows moved and what would help. Train with "
            "--explain to see it."
        )
    elif run.explained_step < run.step:
        said.append(
            f"Tables and advice are of the time to step {run.explained_step:,}: later steps were trained "
            "without --explain."
        )
    elif run.findings is not None and run.findings.detail["first_step"]:
        first = run.findings.detail["first_step"]
        said.append(f"Tables and advice are of the time since the run was resumed after step {first:,}.")
    if run.findings is not None and (forgotten := run.findings.detail["forgotten"]):
        said.append(
            f"{forgotten:,} rows used long ago were forgotten to save memory: where they moved again, that "
            "counts as a first use."
        )
    return said


def tiles(run: RunRecord) -> list[tuple[str, str]]:
    """Return a few numbers with their names."""
    shown = [(f"{run.step:,}", "steps")]
    if speed := _median_speed(run):
        shown.append((f"{speed:,.0f}", "samples a second, median"))
    found = run.findings
    if found is not None:
        shown.append((seconds_text(found.iteration_seconds), "an iteration"))
        shown.append((bytes_text(found.all_bytes), "moved an iteration"))
        shown.append((f"{found.hit_ratio:.1%}", "hit ratio"))
    shown += [(f"{value:.4f}", name) for name, value in _quality(run)[:1]]
    return shown
