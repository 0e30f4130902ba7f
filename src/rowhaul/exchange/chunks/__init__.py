"""Pruning on a cluster: chunks travel as rows of their own, and all ranks know which there are."""
