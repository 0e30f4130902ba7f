"""Parts of the benchmark of rows on a GPU."""
