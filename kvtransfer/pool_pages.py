"""A worker's KV pool as the hand-over sees it: pages of bytes."""

import torch
from torch import Tensor

from ..kernels.digest import pool_digests
from .messages import Verify


def pool_bytes(
    pool: Tensor,  # [layers, pages, 2, kv_heads, page_size, head_dim]
) -> Tensor:  # [layers, pages, page_bytes] uint8
    """The same memory."""
    return pool.flatten(2).view(torch.uint8)


def verify_digests(
    pages: Tensor,  # [layers, pages, page_bytes] uint8, one's own pool
    verify: Verify,
) -> bytes:
    """What `Reader.digested` wants as the answer to `verify`."""
    layers = pages[verify.first_layer : verify.first_layer + verify.layers]
    return pool_digests(
        layers, verify.pages, ticket=verify.ticket, first_layer=verify.first_layer, ordinal=verify.ordinal
    )
