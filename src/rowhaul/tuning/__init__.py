"""Decisions made while training: the workers' shares, the replicated rows, the passes of `joint:auto`."""
