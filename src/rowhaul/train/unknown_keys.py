"""Says how much of some data a model cannot know, and warns where that is suspiciously much."""

from __future__ import annotations

from collections.abc import Mapping

JUMP = 0.2  # above the share in the run's own evaluation
HIGH = 0.95  # where there was none
_FEATURES_NAMED = 3


def unknown_text(share: float, by_feature: Mapping[str, float]) -> str:
    """The share of ids that were never trained, and the feature that has the most."""
    if not share:
        return "none of the ids read"
    most = max(by_feature, key=lambda name: by_feature[name])
    return f"{share:.1%} of the ids read (most of {most!r}: {by_feature[most]:.1%})"


def unknown_warning(by_feature: Mapping[str, float], before: Mapping[str, float] | None = None) -> str:
    """Warn of features whose ids are mostly unknown; empty if there are none.

    Args:
        by_feature: shares of ids that were never trained.
        before: the same from the run's own evaluation, if there was one.
    """
    known = before or {}
    jumped = []
    for name, share in by_feature.items():
        if share >= min(1.0, known[name] + JUMP) if name in known else share >= HIGH:
            then = f" ({known[name]:.1%} when the run was evaluated)" if name in known else ""
            jumped.append(f"{share:.1%} of the ids of {name!r}{then}")
    if not jumped:
        return ""
    more = f" and {len(jumped) - _FEATURES_NAMED} more features" if len(jumped) > _FEATURES_NAMED else ""
    return (
        f"warning: never trained: {', '.join(jumped[:_FEATURES_NAMED])}{more}. Are these the ids that the "
        "model was trained on: the same columns, types and spelling?"
    )
