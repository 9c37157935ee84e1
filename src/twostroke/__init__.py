"""twostroke serves Transformer language models with prefill and decode in separate processes."""

__version__ = "0.1.0"
