"""Sums over ranks, in rank order: the same bits on every rank, whichever way the values travel."""
