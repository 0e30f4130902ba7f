"""Rows on a GPU: an index of raw keys, the sparse step, and records in the card's memory."""
