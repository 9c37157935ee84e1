"""Generated from protos/twostroke/v1; `make protos` renews it."""
