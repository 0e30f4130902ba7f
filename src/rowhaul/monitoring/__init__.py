"""Watching a run from outside: metrics for Prometheus, a health check, logs as JSON lines."""
