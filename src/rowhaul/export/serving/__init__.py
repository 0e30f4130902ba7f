"""Export to a folder that models are served from: rows in one mapped file, the rest of a model as a graph."""
