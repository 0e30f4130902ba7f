"""Plans made once a host, shared with its other ranks, and agreed on by all before anyone acts."""
