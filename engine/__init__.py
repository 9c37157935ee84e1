"""One worker's inference; knows no network."""
