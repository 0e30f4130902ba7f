"""A worker's cache on its card: plans are carried out there, rows are read and stepped there."""
