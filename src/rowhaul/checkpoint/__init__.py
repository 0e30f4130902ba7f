"""The on-disk format of trained models: key-addressed rows, dense tensors, a manifest written last."""

from rowhaul.checkpoint.layout import MANIFEST_FILE, TableEntry, latest_checkpoint
from rowhaul.checkpoint.location import Place, Url, as_place
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.shard import Shard, ShardWriter
from rowhaul.checkpoint.writer import CheckpointWriter

__all__ = [
    "MANIFEST_FILE",
    "CheckpointReader",
    "CheckpointWriter",
    "Place",
    "Shard",
    "ShardWriter",
    "TableEntry",
    "Url",
    "as_place",
    "latest_checkpoint",
]
