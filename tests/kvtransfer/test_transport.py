"""Pages into a mapped pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from twostroke.errors import Mismatch
from twostroke.kernels.digest import page_digests
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.shm import SharedPool
from twostroke.kvtransfer.transport import ShmTransport

LAYERS, SRC, DST, BYTES = 3, 9, 14, 40


def push(transport: ShmTransport, layer: int, src: list[int], dst: list[int]) -> bytes:
    """Copies at once; the digests told."""
    told: list[tuple[int, bytes]] = []
    transport.start(Copy(7, 1, 4, layer, 2, tuple(src), tuple(dst)), lambda *result: told.append(result))
    [(number, digests)] = told
    assert number == 7
    return digests


@pytest.fixture(name="pair")
def _pair(tmp_path: Path) -> Iterator[tuple[ShmTransport, Tensor, Tensor]]:
    """A transport, its source [LAYERS, SRC, BYTES] and the peer's pool [LAYERS, DST, BYTES]."""
    peer = SharedPool.create(tmp_path, LAYERS * DST * BYTES, incarnation=1)
    source = torch.randint(1, 256, (LAYERS, SRC, BYTES), dtype=torch.uint8)
    opened = SharedPool.open(peer.descriptor, incarnation=1, nbytes=peer.nbytes)
    transport = ShmTransport(source, opened, DST)
    yield transport, source, peer.tensor.view(LAYERS, DST, BYTES)
    transport.close()
    transport.close()
    with pytest.raises(ValueError, match="closed"):
        push(transport, 0, [1], [1])
    peer.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(layer=st.integers(0, LAYERS - 1), data=st.data())
def test_copies_these_pages_and_nothing_else(
    pair: tuple[ShmTransport, Tensor, Tensor], layer: int, data: st.DataObject
) -> None:
    transport, source, target = pair
    dst = data.draw(st.lists(st.integers(1, DST - 1), unique=True))
    src = data.draw(st.lists(st.integers(0, SRC - 1), min_size=len(dst), max_size=len(dst)))
    expected = target.clone()
    expected[layer, dst] = source[layer, src]
    digests = push(transport, layer, src, dst)
    assert torch.equal(target, expected)
    names = {"ticket": 4, "layer": layer, "ordinal": 2}
    assert page_digests(target[layer], dst, **names) == digests


@pytest.mark.parametrize(
    ("layer", "src", "dst"),
    [(0, [1], [0]), (0, [1], [DST]), (0, [1, SRC], [1, 2]), (0, [-1], [1]), (0, [1], [-1]), (LAYERS, [1], [1]),
     (-1, [1], [1]), (0, [1, 2], [1]), (0, [], [1])],
)  # fmt: skip
def test_out_of_range_writes_nothing(
    pair: tuple[ShmTransport, Tensor, Tensor], layer: int, src: list[int], dst: list[int]
) -> None:
    transport, _, target = pair
    with pytest.raises(ValueError, match=r"page|layer|onto"):
        push(transport, layer, src, dst)
    assert not target.any()


def test_probe_touches_page_0_only(pair: tuple[ShmTransport, Tensor, Tensor]) -> None:
    transport, _, target = pair
    assert transport.probe() > 0
    assert not target[:, 1:].any()


def test_a_pool_of_another_size_is_refused(tmp_path: Path) -> None:
    peer = SharedPool.create(tmp_path, LAYERS * DST * BYTES, incarnation=1)
    with pytest.raises(Mismatch, match="layers x 15 pages"):
        ShmTransport(torch.zeros((LAYERS, SRC, BYTES), dtype=torch.uint8), peer, DST + 1)
    peer.close()
