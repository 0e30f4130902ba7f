"""Pruned rows of one process: chunks in an arena, found by the map."""
