"""The Open Inference Protocol over gRPC, with Triton's stream: a thin door onto the lifecycle of a request."""
