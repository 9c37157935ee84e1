"""Load on a gateway, and what it measured."""
