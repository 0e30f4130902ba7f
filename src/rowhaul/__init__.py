"""Rowhaul."""
