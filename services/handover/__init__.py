"""Engine and KV transfer joined: the two roles, and the links between their workers."""
