"""Collections of embedding tables, jagged inputs and models: plain ``torch.nn`` modules."""

from rowhaul.nn.batch import Batch
from rowhaul.nn.batch_norm import BatchNorm1d, convert_batch_norm, set_reducer
from rowhaul.nn.collection import TableCollection
from rowhaul.nn.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rowhaul.nn.dropout import SampleDropout
from rowhaul.nn.embedding import EmbeddingBagCollection
from rowhaul.nn.exactness import check_trainable, refuse_clipping, refuse_scaler
from rowhaul.nn.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rowhaul.nn.optimizer import RowOptimizer
from rowhaul.nn.packed_rows import RowPrecision
from rowhaul.nn.unpooled import EmbeddingCollection
from rowhaul.nn.wrapping import RowEmbedding, RowEmbeddingBag, step_rows_with, wrap

__all__ = [
    "Batch",
    "BatchNorm1d",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "RowEmbedding",
    "RowEmbeddingBag",
    "RowOptimizer",
    "RowPrecision",
    "SampleDropout",
    "TableCollection",
    "check_trainable",
    "convert_batch_norm",
    "refuse_clipping",
    "refuse_scaler",
    "set_reducer",
    "step_rows_with",
    "wrap",
]
