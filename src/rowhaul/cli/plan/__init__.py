"""`rowhaul plan`: how many machines to take, before any is bought."""
