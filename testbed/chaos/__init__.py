"""Faults thrown at a small cluster while it trains, and what became of the run."""
