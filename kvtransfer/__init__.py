"""Paged KV between workers; knows no engine."""
