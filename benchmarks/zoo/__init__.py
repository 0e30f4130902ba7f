"""The models of the library over its rows, and the very same models over PyTorch's own tables."""
