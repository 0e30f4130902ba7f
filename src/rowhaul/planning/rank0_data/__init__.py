"""Training data that only rank 0 can read: ids go to every host, the rest to the rank that trains it."""
