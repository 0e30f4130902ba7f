"""Labels that can be learned: a logit from the visible columns and from how taste meets what is shown.

Every id has a fixed effect, strongest for popular ids and none for those beyond the first 16,384 of a
field, which no log shows often enough to learn; numbers have one too. The interaction is a product of
short vectors, one per taste: factorisation machines and deeper models can find it, a linear model
cannot. The sum is then scaled and shifted so that every seed has the preset's base rate and strength
of signal, and a label is 1 with probability sigmoid(logit).

In a log whose rare ids carry signal (``rare_signal``) effects do not weaken with rarity: every id has one of
its own, and shares another with the ids that are about as popular, as unknown films tend to be rated alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.data.generate.attributes import Columns
from rowhaul.data.generate.counters import stream, uniforms
from rowhaul.data.generate.spec import DenseField, IdField, Preset

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LEARNABLE_IDS = 16_384
HALVING_RANK = 300.0  # around here an effect is down by half
AFFINITY_DIM = 4
CONVERSION_SHIFT = -1.0  # about a quarter of clicks convert
OWN, COMMON = 0.8, 0.6  # parts of an effect where rare ids carry signal; their squares add up to 1


class LabelModel:
    """The true click probability of every sample."""

    def __init__(self, preset: Preset, seed: int, *, rare_signal: bool = False) -> None:
        self._preset = preset
        self._seed = seed
        make = _EffectsOfAll if rare_signal else _EffectsOfPopular
        self._effects = [make(field, seed) for field in preset.ids]
        self._affinity = _affinity(preset, seed)
        self._scale, self._shift = 1.0, 0.0

    def scores(self, columns: Columns) -> Floats:
        """The sum of all effects, before it is scaled; what is missing has no effect."""
        visits = columns.visits
        shown = visits.members[self._preset.entities[-1].name]
        total = self._affinity[visits.tastes, shown.tastes]
        for effects, ranks, missing in zip(self._effects, columns.ranks, columns.missing_ids, strict=True):
            total += np.where(missing, 0.0, effects(ranks))
        for field, numbers, missing in zip(
            self._preset.dense, columns.numbers, columns.missing_numbers, strict=True
        ):
            total += np.where(missing, 0.0, _dense_effect(field, numbers))
        return total

    def calibrate(self, pilot: Floats) -> None:
        """Choose scale and shift from the scores of some samples."""
        spread = float(pilot.std())
        self._scale = self._preset.signal / spread if spread else 0.0
        low, high = -30.0, 30.0
        for _ in range(60):
            self._shift = (low + high) / 2 - self._scale * float(pilot.mean())
            if self.probabilities(pilot).mean() < self._preset.base_rate:
                low = (low + high) / 2
            else:
                high = (low + high) / 2

    def probabilities(self, scores: Floats) -> Floats:
        """The probability of a positive label."""
        return 1.0 / (1.0 + np.exp(-(self._shift + self._scale * scores)))

    def conversions(self, columns: Columns) -> Floats:
        """The probability of a conversion after a click: other effects of the same ids, and as strong."""
        total = np.zeros(len(columns.visits.rows))
        for field, ranks, missing in zip(self._preset.ids, columns.ranks, columns.missing_ids, strict=True):
            known = np.minimum(ranks, LEARNABLE_IDS)
            total += np.where(missing, 0.0, field.weight * _units(self._seed, field, "conversion", known))
        scale = self._preset.signal / np.sqrt(sum(field.weight**2 for field in self._preset.ids))
        chances: Floats = 1.0 / (1.0 + np.exp(-(CONVERSION_SHIFT + scale * total)))
        return chances

    def draw_conversions(self, probabilities: Floats, rows: Int64s) -> Bools:
        """Whether a click is followed by a conversion."""
        return uniforms(stream(self._seed, "conversion"), rows) < probabilities

    def draw(self, probabilities: Floats, rows: Int64s) -> Bools:
        """The labels."""
        return uniforms(stream(self._seed, "label"), rows) < probabilities


class _EffectsOfPopular:
    """Effects of a field's ids by rank, weaker the rarer they are."""

    def __init__(self, field: IdField, seed: int) -> None:
        ranks = np.arange(min(field.law.support, LEARNABLE_IDS))
        falling = field.weight / np.sqrt(1.0 + 3.0 * ranks / HALVING_RANK)
        self._table = np.append(falling * _units(seed, field, "effect", ranks), 0.0)  # 0: all ranks beyond

    def __call__(self, ranks: Int64s) -> Floats:
        effects: Floats = self._table[np.minimum(ranks, len(self._table) - 1)]
        return effects


class _EffectsOfAll:
    """Effects of a field's ids by rank, as strong for rare ids as for popular ones."""

    def __init__(self, field: IdField, seed: int) -> None:
        self._field, self._seed = field, seed

    def __call__(self, ranks: Int64s) -> Floats:
        octaves = np.frexp(ranks + 1.0)[1].astype(np.int64)
        own = _units(self._seed, self._field, "effect", ranks)
        common = _units(self._seed, self._field, "common effect", octaves)
        return self._field.weight * (OWN * own + COMMON * common)


def _units(seed: int, field: IdField, what: str, counters: Int64s) -> Floats:
    """Numbers of variance 1, one a counter."""
    units: Floats = np.sqrt(3.0) * (2.0 * uniforms(stream(seed, field.name, what), counters) - 1.0)
    return units


def _dense_effect(field: DenseField, values: npt.NDArray[np.float32]) -> Floats:
    spread = 1.8 * field.shape  # the standard deviation of a log-logistic's logarithm
    above = np.log1p(values.astype(np.float64) + field.lowest) - np.log1p(field.median)
    effect: Floats = field.weight * np.clip(above / spread, -3.0, 3.0)
    return effect


def _affinity(preset: Preset, seed: int) -> Floats:
    """How much each taste likes what fits each taste: tastes x tastes."""
    counters = np.arange(preset.tastes * AFFINITY_DIM)
    vectors = (2.0 * uniforms(stream(seed, "affinity"), counters) - 1.0).reshape(preset.tastes, AFFINITY_DIM)
    products = vectors @ vectors.T
    weighted: Floats = preset.affinity * products / products.std()
    return weighted
