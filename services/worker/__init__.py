"""One engine in a process: its thread, its sessions with gateways."""
