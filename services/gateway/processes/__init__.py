"""Several gateway processes on the same addresses: what they share, and who starts them."""
