"""Generated from protos/smg, the protocol by which LLM routers drive vLLM engines; `make protos` renews it."""
