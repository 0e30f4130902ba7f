"""`rowhaul size`."""
