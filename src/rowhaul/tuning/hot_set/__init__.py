"""The replicated hot set: how many rows, which ones, and when to choose again."""
