"""Sources of samples without a known end: a folder that grows, lines of JSON, Redis Streams."""
