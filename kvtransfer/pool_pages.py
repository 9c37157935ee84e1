"""A worker's KV pool as the hand-over sees it: pages of bytes."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

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


Digested: TypeAlias = Callable[[bytes], None]
"""What `Reader.digested` wants; digests of zeros where the device failed. Any thread."""


class Digester(Protocol):
    """Computes the digests of pages of one's own pool. One thread uses it."""

    def start(self, verify: Verify, digested: Digested) -> None:
        """`digested` comes once: within this call, or later on another thread."""
        ...

    def close(self) -> None:
        """Waits for what was started. No `digested` comes once it returned."""
        ...


class CpuDigester:
    """By the CPU, at once."""

    def __init__(
        self,
        pages: Tensor,  # [layers, pages, page_bytes] uint8
    ) -> None:
        """`pages`: one's own pool."""
        self._pages = pages

    def start(self, verify: Verify, digested: Digested) -> None:
        """See `Digester.start`."""
        digested(verify_digests(self._pages, verify))

    def close(self) -> None:
        """Nothing is under way."""
