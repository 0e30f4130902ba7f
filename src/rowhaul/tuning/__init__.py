"""Decisions made while training: how many samples each worker gets, which rows are replicated."""
