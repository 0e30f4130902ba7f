"""How many machines are worth it, before any is bought: predictions from a sample of the data."""
