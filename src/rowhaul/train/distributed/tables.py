"""A model's tables, as plans number them."""

from __future__ import annotations

from torch import nn

from rowhaul.data.samples import Samples
from rowhaul.errors import ConfigError
from rowhaul.nn import TableCollection
from rowhaul.runtime.layout import TableLayout
from rowhaul.schedule import IdBatch
from rowhaul.store import TableSpec
from rowhaul.train.row_lifecycle import table_of_feature


def only_collection(model: nn.Module) -> TableCollection:
    """Return the one collection of tables of a model."""
    found = [one for one in model.modules() if isinstance(one, TableCollection)]
    if len(found) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} collections of tables; distributed training needs "
            "exactly one, whose rows one plan moves: put all tables into one EmbeddingBagCollection or, if "
            "features are not to be pooled, one EmbeddingCollection"
        )
    return found[0]


def layout_of(collection: TableCollection) -> TableLayout:
    """Describe a collection's tables as every rank needs to know them."""
    configs = collection.table_configs()
    features = [feature for config in configs for feature in config.feature_names]
    twice = sorted({feature for feature in features if features.count(feature) > 1})
    if twice:
        raise ConfigError(
            f"feature {twice[0]!r} reads two tables; distributed training needs one table a feature: "
            "give the second one a feature of its own"
        )
    whole = TableLayout(
        tuple(TableSpec(one.name, one.embedding_dim, *one.initial_range, one.init_fn) for one in configs),
        collection.optimizer,
        str(configs[0].data_type).removeprefix("torch."),
        collection.seed,
    )
    settings = collection.row_settings
    return whole if settings is None else settings.layout(whole)


def may_stay_home(collection: TableCollection) -> bool:
    """Whether ranks can train rows without moving them: whole ones, in host memory."""
    return layout_of(collection).row_format == "whole" and collection.device.type == "cpu"


def ids_of(collection: TableCollection, samples: Samples) -> IdBatch:
    """Return the ids of a batch as the scheduler will see them."""
    tables = tables_of_features(collection, samples.features)
    return IdBatch.from_features(tables, samples.values, samples.lengths, samples.time)


def tables_of_features(collection: TableCollection, features: tuple[str, ...]) -> list[int]:
    """Return the number of the table that each feature of the data reads."""
    table = table_of_feature(collection)
    unread = [name for name in features if name not in table]
    if unread:
        raise ConfigError(
            f"feature {unread[0]!r} of the data reads no table of the model; leave it out of the schema, or "
            "give it a table"
        )
    return [table[name] for name in features]
