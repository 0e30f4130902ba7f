"""What is pruned and when, from ids and numbers alone: no tensors, no records, the same on every rank."""
