"""Delimited logs, plain or compressed, parsed straight into typed columns."""
