"""Messages between ranks: Gloo between hosts, pipes within one, threads for tests; and the sums over them."""
