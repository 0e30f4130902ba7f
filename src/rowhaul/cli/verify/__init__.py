"""`rowhaul verify`."""
