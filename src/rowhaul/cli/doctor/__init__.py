"""`rowhaul doctor`."""
