"""Processes and the network: gateway, prefill, decode, command line."""
