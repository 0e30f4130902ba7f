"""Pruning over several ranks."""
