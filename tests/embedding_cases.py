"""Small collections and batches for the tests of the collection."""

from contextlib import contextmanager

import torch

from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor


def jagged(bags_by_feature, weights=None):
    """A KeyedJaggedTensor from {feature: [[ids of sample 0], [ids of sample 1], ...]}."""
    values = [key for bags in bags_by_feature.values() for bag in bags for key in bag]
    lengths = [len(bag) for bags in bags_by_feature.values() for bag in bags]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(bags_by_feature),
        values=torch.tensor(values, dtype=torch.int64),
        weights=weights,
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def values_of(collection, table):
    """{key: values} of every row of a table."""
    dim = next(c.embedding_dim for c in collection.table_configs() if c.name == table)
    return {
        int(key): record[:dim].copy()
        for keys, records in collection.rows(table)
        for key, record in zip(keys, records, strict=True)
    }


@contextmanager
def torch_threads(number):
    """Collections made inside share their work among so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_table(dim=4, features=("f",), **options):
    table = EmbeddingBagConfig(embedding_dim=dim, name="t", feature_names=list(features))
    return EmbeddingBagCollection([table], **options)
