"""The models of the papers, by name, as plain ``torch.nn`` modules over a collection of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from rowhaul._nearest import did_you_mean
from rowhaul.errors import ConfigError
from rowhaul.nn.config import EmbeddingBagConfig, EmbeddingConfig
from rowhaul.nn.models.base import RecommendationModel
from rowhaul.nn.models.dcn import DeepAndCross, DeepAndCrossOptions
from rowhaul.nn.models.dcnv2 import DCNv2, DCNv2Options
from rowhaul.nn.models.deepfm import DeepFM, DeepFMOptions
from rowhaul.nn.models.din import DIN, DINOptions
from rowhaul.nn.models.dlrm import DLRM, DLRMOptions
from rowhaul.nn.models.esmm import ESMM, ESMMOptions
from rowhaul.nn.models.finalmlp import FinalMLP, FinalMLPOptions
from rowhaul.nn.models.legacy import Legacy, LegacyOptions
from rowhaul.nn.models.mmoe import MMoE, MMoEOptions
from rowhaul.nn.models.multi_task import MultiTaskModel
from rowhaul.nn.models.ncf import NeuMF, NeuMFOptions
from rowhaul.nn.models.ple import PLE, PLEOptions
from rowhaul.nn.models.sasrec import SASRec, SASRecOptions
from rowhaul.nn.models.sequence import SequenceModel
from rowhaul.nn.models.two_tower import TwoTower, TwoTowerOptions
from rowhaul.nn.models.wide_deep import WideAndDeep, WideAndDeepOptions

MODELS: dict[str, type[RecommendationModel]] = {
    "wide_deep": WideAndDeep,
    "deepfm": DeepFM,
    "dcn": DeepAndCross,
    "dcnv2": DCNv2,
    "finalmlp": FinalMLP,
    "dlrm": DLRM,
    "ncf": NeuMF,
    "legacy": Legacy,
    "mmoe": MMoE,
    "ple": PLE,
    "esmm": ESMM,
    "din": DIN,
    "sasrec": SASRec,
    "two_tower": TwoTower,
}


def build_model(
    name: str,
    *,
    tables: Mapping[str, Sequence[str]],
    num_dense: int,
    embedding_dim: int,
    make_collection: Callable[[list[Any]], nn.Module],
    seed: int,
    options: Mapping[str, Any] | None = None,
    num_tasks: int = 1,
    histories: Sequence[str] = (),
    negatives: Mapping[str, str] | None = None,
) -> RecommendationModel:
    """Build the model called ``name`` with its collection.

    Args:
        name: a key of `MODELS`.
        tables: the features that read each table, as ``Schema.tables``.
        num_dense: number of dense columns.
        embedding_dim: size of an embedding; rows may be wider, see `RecommendationModel.row_width`.
        make_collection: makes the collection from the configurations of its tables: an
            `EmbeddingBagCollection` of `EmbeddingBagConfig` or an `EmbeddingCollection` of `EmbeddingConfig`.
        seed: of the dense weights and of dropout.
        options: fields of the model's ``Options``.
        num_tasks: labels to predict; a model of several returns samples x labels.
        histories: features whose ids are in order, as ``Schema.histories``.
        negatives: features that are drawn, and the feature each is drawn against.
    """
    options = options or {}
    if name not in MODELS:
        known_names = ", ".join(MODELS)
        raise ConfigError(f"unknown model {name!r}{did_you_mean(name, MODELS)}; known are {known_names}")
    _check_tasks(name, num_tasks)
    kind = MODELS[name]
    known = [field.name for field in fields(kind.Options)]
    unknown = [option for option in options if option not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"model {name!r} has no option {unknown[0]!r}{near}; known are {', '.join(known)}")
    if not isinstance(embedding_dim, int) or embedding_dim < 1:
        raise ConfigError(f"embedding_dim must be at least 1, got {embedding_dim!r}")
    if negatives and not kind.reads_negatives:
        raise ConfigError(
            f"model {name!r} does not read negatives, of which the schema draws {', '.join(negatives)}; "
            "leave them out of the schema, or take sasrec or two_tower"
        )
    found = {name: given for name, given in kind.roles(tables, histories, negatives or {}).items() if given}
    checked = kind.Options(**{**found, **options})
    kind.check_negatives(checked, negatives or {})
    width = kind.row_width(embedding_dim)
    config = EmbeddingBagConfig if kind.is_pooled else EmbeddingConfig
    configs = [
        config(embedding_dim=width, name=table, feature_names=list(features))
        for table, features in tables.items()
    ]
    make: Callable[..., RecommendationModel] = kind
    more = {"num_tasks": num_tasks} if issubclass(kind, MultiTaskModel) else {}
    return make(make_collection(configs), num_dense, checked, seed, **more)


def _check_tasks(name: str, num_tasks: int) -> None:
    kind = MODELS[name]
    if kind.least_tasks <= num_tasks <= kind.most_tasks:
        return
    able = [other for other, one in MODELS.items() if one.least_tasks <= num_tasks <= one.most_tasks]
    given = "1 label" if num_tasks == 1 else f"{num_tasks} labels"
    raise ConfigError(
        f"model {name!r} predicts {'two labels' if kind.least_tasks > 1 else 'one label'}, but the schema "
        f"has {given}; choose one of {', '.join(able)}, or change the labels of the schema"
    )


__all__ = [
    "DIN",
    "DLRM",
    "ESMM",
    "MODELS",
    "PLE",
    "DCNv2",
    "DCNv2Options",
    "DINOptions",
    "DLRMOptions",
    "DeepAndCross",
    "DeepAndCrossOptions",
    "DeepFM",
    "DeepFMOptions",
    "ESMMOptions",
    "FinalMLP",
    "FinalMLPOptions",
    "Legacy",
    "LegacyOptions",
    "MMoE",
    "MMoEOptions",
    "MultiTaskModel",
    "NeuMF",
    "NeuMFOptions",
    "PLEOptions",
    "RecommendationModel",
    "SASRec",
    "SASRecOptions",
    "SequenceModel",
    "TwoTower",
    "TwoTowerOptions",
    "WideAndDeep",
    "WideAndDeepOptions",
    "build_model",
]
