"""Shared by all tests: one torch thread, so that two cores serve many processes."""

import torch

torch.set_num_threads(1)
