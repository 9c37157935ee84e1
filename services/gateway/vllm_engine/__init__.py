"""The door for LLM routers: `vllm.grpc.engine.VllmEngine`, by which they take the gateway for one engine."""
