"""Pools as pages of bytes, and peers' pools written by page."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from twostroke.errors import Mismatch
from twostroke.kernels.digest import page_digests
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.peer_pools import PeerPools
from twostroke.kvtransfer.pool_pages import pool_bytes
from twostroke.kvtransfer.shm import SharedPool
from twostroke.services.handover.kv_pool import shm_opener
from twostroke.services.handover.wire_link import PoolOffer

SHAPE = (3, 5, 2, 3, 4, 2)  # layers, pages, K and V, heads, page size, width
READER = 77


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bytes_are_the_same_memory(dtype: torch.dtype) -> None:
    pool = torch.zeros(SHAPE, dtype=dtype)
    view = pool_bytes(pool)
    assert view.shape == (3, 5, 2 * 3 * 4 * 2 * pool.element_size())
    pool[1, 2, 1, 2, 3, 1] = 1.0
    assert view[1, 2].any()
    view[1, 2] = 0
    assert not pool.any()


def offered(directory: Path, pages: int) -> tuple[SharedPool, PoolOffer]:
    page_bytes = 2 * 3 * 4 * 2 * 4
    shared = SharedPool.create(directory, 3 * pages * page_bytes, incarnation=READER)
    return shared, PoolOffer(1, pages, page_bytes, shared.descriptor)


def test_pages_are_pushed_with_their_digests(tmp_path: Path) -> None:
    mine = torch.randn(SHAPE)
    shared, offer = offered(tmp_path, 9)
    pools = PeerPools()
    landed: list[tuple[Sequence[Copy], bytes]] = []
    pools.add(READER, shm_opener(mine)(offer, READER, lambda: None))
    copy = Copy(1, READER, ticket=4, layer=2, ordinal=6, src=(3, 1), dst=(7, 8))
    pools.push([copy], lambda *result: landed.append(result))
    [(copies, digests)] = landed
    assert list(copies) == [copy]
    theirs = shared.tensor.view(3, 9, -1)
    assert torch.equal(theirs[2, [7, 8]], pool_bytes(mine)[2, [3, 1]])
    assert digests == page_digests(theirs[2], (7, 8), ticket=4, layer=2, ordinal=6)
    assert not theirs[:2, 1:].any()
    pools.drop(READER)
    pools.drop(READER)
    pools.push([copy], lambda *result: landed.append(result))
    assert landed[1:] == [((copy,), bytes(16))]  # a failed copy: digests that match nothing
    pools.close()
    shared.close()


def test_another_size_than_offered_is_refused(tmp_path: Path) -> None:
    shared, offer = offered(tmp_path, 9)
    with pytest.raises(Mismatch):
        shm_opener(torch.zeros(SHAPE))(PoolOffer(1, 8, offer.page_bytes, offer.descriptor), READER, lambda: None)
    with pytest.raises(Mismatch):
        shm_opener(torch.zeros(SHAPE))(offer, READER + 1, lambda: None)
    shared.close()
