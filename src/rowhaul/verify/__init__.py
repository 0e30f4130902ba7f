"""Trains on a cluster and again in one process, and finds the largest difference."""
