"""Ids and pooled embeddings as keyed tensors, under the names that TorchRec made common.

A sample has any number of ids per feature, so ids travel as one flat tensor plus lengths. The
classes here have TorchRec's names, argument order and meaning, and need nothing but PyTorch. They
are stricter about mistakes: what does not add up is refused where it is made. On an accelerator
that check would stall the stream, so there it waits for the first call that needs sizes anyway.
"""

from rowhaul.nn.jagged.jagged_tensor import JaggedTensor
from rowhaul.nn.jagged.keyed_jagged_tensor import KeyedJaggedTensor, as_keyed_jagged
from rowhaul.nn.jagged.keyed_tensor import KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "as_keyed_jagged"]
