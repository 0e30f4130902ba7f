"""`rowhaul simulate`."""
