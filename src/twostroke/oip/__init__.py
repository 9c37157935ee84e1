"""Generated from protos/inference, the Open Inference Protocol; `make protos` renews it."""
