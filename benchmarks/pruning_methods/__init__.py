"""Other ways to make embedding tables smaller, and what compares them with pruning on equal terms."""
