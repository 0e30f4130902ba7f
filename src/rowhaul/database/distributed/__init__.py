"""The embedding database over several processes."""
