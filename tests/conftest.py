"""Shared by all tests: one torch thread, as two cores serve many processes; without a GPU, Triton's interpreter."""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported
