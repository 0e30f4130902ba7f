"""Existing models with ``nn.Embedding`` and ``nn.EmbeddingBag``: their tables become rows."""

from rowhaul.nn.wrapping.row_modules import RowEmbedding, RowEmbeddingBag
from rowhaul.nn.wrapping.wrap import step_rows_with, wrap

__all__ = ["RowEmbedding", "RowEmbeddingBag", "step_rows_with", "wrap"]
