"""Digests of KV pages: 64 bits a page, sensitive to order, salted by ticket, layer and place in the ticket.

A page is read as little-endian 64-bit words w. Each is folded, x = w ^ (w >> 32), and

    digest = mix(salt + sum_i x_i * m_i) modulo 2**64, m_i odd, its low 25 bits equal to 2 i + 1.

Folding and mix (splitmix64's finaliser) are bijections, so

- any change within one word changes the digest, as m_i is odd;
- any swap of two unequal words does: x_i - x_j has at most 31 trailing zero bits and m_i - m_j at most 24;
- two flips of a top bit do not cancel, for the same reason with m_i + m_j.

Anything else goes unnoticed with a probability of about 2**-64. It guards against faults, not against an adversary.
One multiply-add a word and no carried state, so a GPU kernel can compute the same. The family is multilinear hashing
(Lemire and Kaser 2014, arXiv:1202.4961); the finaliser is that of Steele, Lea and Flood's SplitMix (OOPSLA 2014).
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

DIGEST_BYTES = 8
_MASK = (1 << 64) - 1
_POSITION_BITS = 25  # pages up to 64 MiB keep the guarantees above
_CHUNK_BYTES = 1 << 19  # folded copies of so many bytes stay in the second-level cache

_Words = npt.NDArray[np.uint64]


def page_digests(
    layer_pool: Tensor,  # [pages, page_bytes] uint8
    ids: Sequence[int],
    *,
    ticket: int,
    layer: int,
    ordinal: int,
) -> bytes:
    """Digests of pages `ids` of one layer, 8 little-endian bytes each, in the order of `ids`.

    `ordinal` is the place of ids[0] in the ticket's page list; the others follow. `page_bytes` must be a multiple of 8.
    Raises ValueError when it is not or the tensor's rows are not contiguous.
    """
    return pool_digests(layer_pool.unsqueeze(0), ids, ticket=ticket, first_layer=layer, ordinal=ordinal)


def pool_digests(
    pool: Tensor,  # [layers, pages, page_bytes] uint8
    ids: Sequence[int],
    *,
    ticket: int,
    first_layer: int,
    ordinal: int,
) -> bytes:
    """`page_digests` of the same pages of several layers, layer by layer; pool[0] is layer `first_layer`."""
    if not len(ids) or not len(pool):
        return b""
    sums = _word_sums(pool, torch.tensor(ids, dtype=torch.int64, device=pool.device))
    salts = _salts(ticket, first_layer, len(pool), ordinal, len(ids))
    return _mix(sums + salts).astype("<u8", copy=False).tobytes()


def fold_layers(digests: bytes, pages: int) -> bytes:
    """One digest a page out of those of all its layers, given layer by layer: their sums modulo 2**64.

    Each is salted by its layer, so that a fault in one is noticed for certain, and several but for about 2**-64.
    Raises ValueError where they are not as many for each page.
    """
    if not pages:
        return b""
    table = np.frombuffer(digests, "<u8").reshape(-1, pages)
    folded: _Words = table.sum(axis=0, dtype=np.uint64)
    return folded.astype("<u8", copy=False).tobytes()


def _word_sums(
    pool: Tensor,  # [layers, pages, page_bytes] uint8
    ids: Tensor,  # [n] int64
) -> _Words:  # [layers, n]
    """sum_i x_i * m_i of each page."""
    layers, _, page_bytes = pool.shape
    if pool.dtype != torch.uint8 or page_bytes % 8 or pool.stride(2) != 1:
        raise ValueError(f"pages must be whole 64-bit words in contiguous uint8, got {pool.dtype} {tuple(pool.shape)}")
    words = pool.view(torch.int64)
    multipliers = _multipliers(page_bytes // 8, pool.device)
    sums = torch.empty((layers, len(ids)), dtype=torch.int64, device=pool.device)
    step = max(1, _CHUNK_BYTES // page_bytes)
    for layer in range(layers):
        for start in range(0, len(ids), step):
            some = words[layer].index_select(0, ids[start : start + step])
            some ^= (some >> 32) & 0xFFFFFFFF  # int64 shifts drag the sign along
            torch.sum(some.mul_(multipliers), dim=1, out=sums[layer, start : start + step])
    return sums.cpu().numpy().view(np.uint64)


@lru_cache(maxsize=8)
def _multipliers(words: int, device: torch.device) -> Tensor:
    """[words] int64: m_i."""
    place = np.arange(words, dtype=np.uint64)
    low = (place * np.uint64(2) + np.uint64(1)) & np.uint64((1 << _POSITION_BITS) - 1)
    high = _mix(place + np.uint64(0x9E3779B97F4A7C15)) << np.uint64(_POSITION_BITS)
    return torch.from_numpy((high | low).view(np.int64)).to(device)


def _salts(ticket: int, first_layer: int, layers: int, ordinal: int, pages: int) -> _Words:
    """[layers, pages]: a different one for each ticket, layer and ordinal."""
    base = _mix(np.array([ticket & _MASK], dtype=np.uint64))
    layer = _mix(base ^ np.arange(first_layer, first_layer + layers, dtype=np.uint64))
    return _mix(layer[:, None] ^ np.arange(ordinal, ordinal + pages, dtype=np.uint64)[None, :])


def _mix(x: _Words) -> _Words:
    """splitmix64's finaliser: a bijection of 64-bit words in which each bit depends on all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
