"""Pruning while training: which parts of which rows are kept, in memory, on disk and on the wire."""
