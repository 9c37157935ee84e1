"""Takes requests in, routes them to workers, merges and answers."""
