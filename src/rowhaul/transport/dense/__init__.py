"""Gradients of dense parameters: packed into one buffer, and summed over the workers."""
