"""Collections of embedding tables, jagged inputs and models: plain ``torch.nn`` modules."""

from rowhaul.nn.batch import Batch
from rowhaul.nn.config import EmbeddingBagConfig, PoolingType
from rowhaul.nn.embedding import EmbeddingBagCollection
from rowhaul.nn.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rowhaul.nn.optimizer import RowOptimizer

__all__ = [
    "Batch",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "RowOptimizer",
]
