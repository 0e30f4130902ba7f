"""The models of the papers, by name, as plain ``torch.nn`` modules over a collection of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from rowhaul._nearest import did_you_mean
from rowhaul.errors import ConfigError
from rowhaul.nn.config import EmbeddingBagConfig
from rowhaul.nn.models.base import RecommendationModel
from rowhaul.nn.models.dcn import DeepAndCross, DeepAndCrossOptions
from rowhaul.nn.models.dcnv2 import DCNv2, DCNv2Options
from rowhaul.nn.models.deepfm import DeepFM, DeepFMOptions
from rowhaul.nn.models.dlrm import DLRM, DLRMOptions
from rowhaul.nn.models.finalmlp import FinalMLP, FinalMLPOptions
from rowhaul.nn.models.legacy import Legacy, LegacyOptions
from rowhaul.nn.models.ncf import NeuMF, NeuMFOptions
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
}


def build_model(
    name: str,
    *,
    tables: Mapping[str, Sequence[str]],
    num_dense: int,
    embedding_dim: int,
    make_collection: Callable[[list[EmbeddingBagConfig]], nn.Module],
    seed: int,
    options: Mapping[str, Any] | None = None,
) -> RecommendationModel:
    """Build the model called ``name`` with its collection.

    Args:
        name: a key of `MODELS`.
        tables: the features that read each table, as ``Schema.tables``.
        num_dense: number of dense columns.
        embedding_dim: size of an embedding; rows may be wider, see `RecommendationModel.row_width`.
        make_collection: makes the collection from the configurations of its tables.
        seed: of the dense weights and of dropout.
        options: fields of the model's ``Options``.
    """
    options = options or {}
    if name not in MODELS:
        known_names = ", ".join(MODELS)
        raise ConfigError(f"unknown model {name!r}{did_you_mean(name, MODELS)}; known are {known_names}")
    kind = MODELS[name]
    known = [field.name for field in fields(kind.Options)]
    unknown = [option for option in options if option not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"model {name!r} has no option {unknown[0]!r}{near}; known are {', '.join(known)}")
    if not isinstance(embedding_dim, int) or embedding_dim < 1:
        raise ConfigError(f"embedding_dim must be at least 1, got {embedding_dim!r}")
    checked = kind.Options(**options)
    width = kind.row_width(embedding_dim)
    configs = [
        EmbeddingBagConfig(embedding_dim=width, name=table, feature_names=list(features))
        for table, features in tables.items()
    ]
    make: Callable[..., RecommendationModel] = kind
    return make(make_collection(configs), num_dense, checked, seed)


__all__ = [
    "DLRM",
    "MODELS",
    "DCNv2",
    "DCNv2Options",
    "DLRMOptions",
    "DeepAndCross",
    "DeepAndCrossOptions",
    "DeepFM",
    "DeepFMOptions",
    "FinalMLP",
    "FinalMLPOptions",
    "Legacy",
    "LegacyOptions",
    "NeuMF",
    "NeuMFOptions",
    "RecommendationModel",
    "WideAndDeep",
    "WideAndDeepOptions",
    "build_model",
]
