"""What a run's links carried and why, what waited for what, and what would help: `--explain`."""
