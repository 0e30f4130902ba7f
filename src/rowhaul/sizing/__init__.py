"""How much memory a run will need, before it runs."""
