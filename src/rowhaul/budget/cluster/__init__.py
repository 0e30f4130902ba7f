"""A budget over several ranks."""
