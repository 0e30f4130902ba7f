"""Rowhaul trains recommendation models whose embedding tables outgrow one worker, exactly.

The names below and those that the sub-packages list are the public interface. They are imported when first
used, so that ``import rowhaul`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rowhaul._lazy import lazy_exports

__version__ = "0.2.0.dev0"  # the only place that names it

if TYPE_CHECKING:
    from rowhaul import checkpoint as checkpoint
    from rowhaul import cluster as cluster
    from rowhaul import data as data
    from rowhaul import database as database
    from rowhaul import errors as errors
    from rowhaul import nn as nn
    from rowhaul import optim as optim
    from rowhaul import pruning as pruning
    from rowhaul import retrieval as retrieval
    from rowhaul import schedule as schedule
    from rowhaul import serve as serve
    from rowhaul import simulate as simulate
    from rowhaul import store as store
    from rowhaul import train as train
    from rowhaul.checkpoint.dcp import DcpReader as DcpReader
    from rowhaul.data.schema import Schema as Schema
    from rowhaul.data.stream import SampleStream as SampleStream
    from rowhaul.database import DatabaseBags as DatabaseBags
    from rowhaul.database import DenseSum as DenseSum
    from rowhaul.database import DistributedEmbeddingDatabase as DistributedEmbeddingDatabase
    from rowhaul.database import EmbeddingDatabase as EmbeddingDatabase
    from rowhaul.errors import RowhaulError as RowhaulError
    from rowhaul.export.pretrained import load_pretrained as load_pretrained
    from rowhaul.nn import Batch as Batch
    from rowhaul.nn import EmbeddingBagCollection as EmbeddingBagCollection
    from rowhaul.nn import EmbeddingBagConfig as EmbeddingBagConfig
    from rowhaul.nn import EmbeddingCollection as EmbeddingCollection
    from rowhaul.nn import EmbeddingConfig as EmbeddingConfig
    from rowhaul.nn import JaggedTensor as JaggedTensor
    from rowhaul.nn import KeyedJaggedTensor as KeyedJaggedTensor
    from rowhaul.nn import KeyedTensor as KeyedTensor
    from rowhaul.nn import RowOptimizer as RowOptimizer
    from rowhaul.nn import step_rows_with as step_rows_with
    from rowhaul.nn import wrap as wrap
    from rowhaul.nn.models import build_model as build_model
    from rowhaul.pruning.settings import PruneSettings as PruneSettings
    from rowhaul.schedule.lifetimes.policy import RowPolicy as RowPolicy
    from rowhaul.train.cluster_config import ClusterConfig as ClusterConfig
    from rowhaul.train.config import TrainConfig as TrainConfig
    from rowhaul.train.distributed import distribute as distribute
    from rowhaul.train.distributed import evaluate as evaluate
    from rowhaul.train.distributed import find_checkpoint as find_checkpoint
    from rowhaul.train.distributed import save_checkpoint as save_checkpoint
    from rowhaul.train.distributed.dcp import find_dcp as find_dcp
    from rowhaul.train.distributed.dcp import load_dcp as load_dcp

_EXPORTS = {
    "": "checkpoint cluster data database errors nn optim pruning retrieval schedule serve simulate "
    "store train",
    "checkpoint.dcp": "DcpReader",
    "data.schema": "Schema",
    "data.stream": "SampleStream",
    "database": "DatabaseBags DenseSum DistributedEmbeddingDatabase EmbeddingDatabase",
    "errors": "RowhaulError",
    "export.pretrained": "load_pretrained",
    "nn": "Batch EmbeddingBagCollection EmbeddingBagConfig EmbeddingCollection EmbeddingConfig JaggedTensor "
    "KeyedJaggedTensor KeyedTensor RowOptimizer step_rows_with wrap",
    "nn.models": "build_model",
    "pruning.settings": "PruneSettings",
    "schedule.lifetimes.policy": "RowPolicy",
    "train.cluster_config": "ClusterConfig",
    "train.config": "TrainConfig",
    "train.distributed": "distribute evaluate find_checkpoint save_checkpoint",
    "train.distributed.dcp": "find_dcp load_dcp",
}
__all__, __getattr__ = lazy_exports("rowhaul", _EXPORTS)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
