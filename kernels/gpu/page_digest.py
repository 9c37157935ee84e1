"""Digests of KV pages on the GPU: those of `kernels/digest.py`, where their definition and reasons stand."""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # words: 32 KiB
_WARPS = 16  # four 16-byte loads a thread in flight
_ALIGNED = 16  # bytes: what Triton compiles anew for
_launched: dict[tuple[object, ...], Any] = {}
"""Compiled kernels by what they are compiled for: to look them up takes Triton as long as to launch them, and a client
waits for the last one. `ids` and `out` are aligned. An interpreted kernel leaves None.
"""


@triton.jit
def _mix(x):
    """splitmix64's finaliser of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _multipliers(place):
    """m_i of the words at `place` (uint64)."""
    low = (place * 2 + 1) & 0x1FFFFFF  # the low 25 bits
    return (_mix(place + 0x9E3779B97F4A7C15) << 25) | low


@triton.jit(do_not_specialize=["pages", "ticket_low", "ticket_high", "first_layer", "ordinal"])
def _page_digest_kernel(
    pool,  # int64 [layers, pages, words]
    ids,  # int32 or int64 [n]
    out,  # int64 [layers, n]
    pages,
    ticket_low,  # the ticket's bits 0 .. 31, as int32
    ticket_high,
    first_layer,
    ordinal,
    words: tl.constexpr,
    block: tl.constexpr,
):
    page, layer = tl.program_id(0), tl.program_id(1)
    first = pool + (layer.to(tl.int64) * pages + tl.load(ids + page)) * words
    sums = tl.zeros((block,), dtype=tl.uint64)
    for start in range(0, words, block):
        place = start + tl.arange(0, block)
        word = tl.load(first + place, mask=place < words, other=0).to(tl.uint64, bitcast=True)
        sums += (word ^ (word >> 32)) * _multipliers(place.to(tl.uint64))
    low = ticket_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    ticket = (ticket_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low
    salt = _mix(_mix(ticket) ^ (first_layer + layer).to(tl.uint64))
    salt = _mix(salt ^ (ordinal + page).to(tl.uint64))
    digest = _mix(tl.sum(sums, axis=0) + salt)
    tl.store(out + layer.to(tl.int64) * tl.num_programs(0) + page, digest.to(tl.int64, bitcast=True))


def digest_pages(
    pool: Tensor,  # [layers, pages, ...] contiguous; a page's bytes are a multiple of 8
    ids: Tensor,  # int32 or int64 [n]
    out: Tensor,  # int64 [layers, n] contiguous: written
    *,
    ticket: int,
    first_layer: int,
    ordinal: int,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Digests of pages `ids` of each layer; pool[0] is layer `first_layer`. Never waits for the device.

    `ordinal` is the place of ids[0] in the ticket's page list; the others follow. The bytes of `out` are what
    `pool_digests` returns of the same pages on a little-endian machine. `stream`: the current one by default; of the
    current device.
    """
    layers, pages = pool.shape[:2]
    if not ids.shape[0] or not layers:
        return
    words = pool if pool.dtype == torch.int64 and pool.dim() == 3 else pool.view(layers, pages, -1).view(torch.int64)
    size = words.shape[2]
    block = min(_BLOCK, triton.next_power_of_2(size))
    grid = (ids.shape[0], layers, 1)
    arguments = (words, ids, out, pages, _signed(ticket), _signed(ticket >> 32), first_layer, ordinal, size, block)
    kind = (words.device, words.data_ptr() % _ALIGNED, ids.dtype, size, block)
    kernel = _launched.get(kind)
    if kernel is not None:
        kernel[grid](*arguments, stream=None if stream is None else stream.cuda_stream)
        return
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        _launched[kind] = _page_digest_kernel[grid](*arguments, num_warps=_WARPS)


def _signed(x: int) -> int:
    """The low 32 bits as an int32: Triton compiles anew for each size of integer."""
    low = x & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
