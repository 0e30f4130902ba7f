"""The study of AUC and log loss against all bytes from a raw key to its row."""
