"""What the two sides launch on a GPU and in which order, with the calls into CUDA replaced; the kernel is interpreted.

The real thing: test_cuda_ipc_gpu.py.
"""

import contextlib
import ctypes
import itertools
import queue
from typing import Any

import numpy as np
import pytest
import torch

from twostroke.kernels.digest import pool_digests
from twostroke.kvtransfer import cuda_source
from twostroke.kvtransfer.cuda_digester import CudaDigester
from twostroke.kvtransfer.cuda_ipc import CudaIpcTransport
from twostroke.kvtransfer.cuda_runtime import COPY_BOX
from twostroke.kvtransfer.cuda_source import CudaSource
from twostroke.kvtransfer.layer_marks import LayerMarks, stretch_ends
from twostroke.kvtransfer.messages import Copy, Verify
from twostroke.kvtransfer.pool_pages import verify_digests

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing is tried")

LAYERS, PAGES, PEER_PAGES, PAGE_BYTES = 3, 9, 12, 256
LOG: list[tuple[Any, ...]] = []


class Event:
    """Happens at once."""

    def __init__(self, **_: Any) -> None:
        self.error: Exception | None = None

    def record(self, _: Any = None) -> None:
        LOG.append(("record", self))

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error

    def elapsed_time(self, end: "Event") -> float:
        return 2.0


class Stream:
    """Remembers what it waits for."""

    cuda_stream = 77
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        LOG.append(("wait", event))

    def synchronize(self) -> None:
        LOG.append(("synchronize",))


class BatchCopy:
    """Copies at once."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, boxes: int, count: int, stream: int) -> None:
        LOG.append(("copy", count, stream))
        if self.fails:
            raise RuntimeError("no")
        room = (ctypes.c_byte * (COPY_BOX.itemsize * count)).from_address(boxes)
        for box in np.frombuffer(room, COPY_BOX):
            for layer, row in itertools.product(range(box["layers"]), range(box["rows"])):
                target, source = (
                    int(box[f"{end}_address"] + (layer * box[f"{end}_layer_rows"] + row) * box[f"{end}_row_bytes"])
                    for end in ("target", "source")
                )
                ctypes.memmove(target, source, int(box["width"]))


class Pool:
    """The peer's."""

    def __init__(self) -> None:
        self.pages = torch.zeros((LAYERS, PEER_PAGES, PAGE_BYTES), dtype=torch.uint8)
        self.address, self.nbytes = self.pages.data_ptr(), self.pages.numel()
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_source, "BatchCopy", BatchCopy)


@pytest.fixture
def pages() -> torch.Tensor:
    return torch.randint(0, 256, (LAYERS, PAGES, PAGE_BYTES), dtype=torch.uint8)


class Side:
    """A transport, and what came of its copies."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.pool = Pool()
        self.source = CudaSource(pages)
        self.transport = CudaIpcTransport(self.source, self.pool, PEER_PAGES)
        self.landed: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

    def push(self, copy: Copy) -> None:
        self.transport.start(copy, lambda *told: self.landed.put(told))


def copy(layer: int, src: tuple[int, ...] = (3, 4, 8), dst: tuple[int, ...] = (10, 11, 2)) -> Copy:
    return Copy(layer + 1, 1, 1 << 33, layer, 5, src, dst)


def test_pages_and_digests(pages: torch.Tensor) -> None:
    side = Side(pages)
    for end in side.source.marks.ends:
        side.source.written(end)
    for layer in range(LAYERS):
        side.push(copy(layer))
    expected = torch.zeros_like(side.pool.pages)
    for layer in range(LAYERS):
        number, digests = side.landed.get(timeout=10)
        assert number == layer + 1
        assert digests == pool_digests(
            pages[layer : layer + 1], (3, 4, 8), ticket=1 << 33, first_layer=layer, ordinal=5
        )
        expected[layer, [10, 11, 2]] = pages[layer, [3, 4, 8]]
    assert torch.equal(side.pool.pages, expected)
    side.transport.close()
    side.source.close()
    assert side.pool.closed


def test_each_copy_waits_for_its_layer_and_is_followed_by_its_event(pages: torch.Tensor) -> None:
    side = Side(pages)
    side.source.written(1)
    ((_, written),) = LOG[-1:]
    LOG.clear()
    side.push(copy(1))
    assert [entry[0] for entry in LOG] == ["wait", "copy", "record"]
    assert LOG[0] == ("wait", written)
    assert LOG[1] == ("copy", 2, 77)  # neighbours are merged
    assert LOG[2][1] is not written
    side.landed.get(timeout=10)
    side.push(copy(1))
    assert LOG[5][1] is LOG[2][1]  # used again once it was seen
    side.landed.get(timeout=10)
    side.source.close()


def test_a_stretch_of_layers_is_one_launch(pages: torch.Tensor) -> None:
    side = Side(pages)
    side.source.written(2)
    ((_, written),) = LOG[-1:]
    LOG.clear()
    landed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    side.transport.start_layers([copy(layer) for layer in (1, 2)], landed.put)
    assert [entry[0] for entry in LOG] == ["wait", "copy", "record"]
    assert LOG[:2] == [("wait", written), ("copy", 2, 77)]
    expected = torch.zeros_like(side.pool.pages)
    expected[1:, [10, 11, 2]] = pages[1:, [3, 4, 8]]
    assert landed.get(timeout=10) == pool_digests(pages[1:], (3, 4, 8), ticket=1 << 33, first_layer=1, ordinal=5)
    assert torch.equal(side.pool.pages, expected)
    side.transport.close()
    side.source.close()


@pytest.mark.parametrize(
    ("layers", "ends"),
    [(1, (0,)), (2, (0, 1)), (3, (1, 2)), (4, (1, 2, 3)), (32, (15, 23, 27, 29, 31)), (30, (14, 22, 26, 28, 29))],
)
def test_stretches_of_layers(layers: int, ends: tuple[int, ...]) -> None:
    assert stretch_ends(layers) == ends
    marks = LayerMarks(layers, torch.device("cuda"))
    for layer in range(layers):
        assert marks.of(layer) is marks.of(next(end for end in ends if end >= layer))
    assert len({id(marks.of(end)) for end in ends}) == len(ends)


def test_a_failed_launch_leaves_nothing_under_way(pages: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(pages)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(cuda_source, "digest_pages", fails)
    with pytest.raises(RuntimeError, match="no kernel"):
        side.push(copy(0))
    assert LOG[-1] == ("synchronize",)  # the copy itself was on its way
    side.transport.close()
    assert side.pool.closed
    assert side.landed.empty()
    side.source.close()


def test_a_device_that_fails_later_gives_digests_that_match_nothing(
    pages: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side(pages)
    slot = side.source._slots.take(3)
    slot.event.error = RuntimeError("lost")  # type: ignore[attr-defined]
    side.source._slots.give(slot)
    side.push(copy(0))
    assert side.landed.get(timeout=10) == (1, bytes(24))
    assert "lost" in caplog.text
    side.source.close()


def test_no_pages_are_done_at_once(pages: torch.Tensor) -> None:
    side = Side(pages)
    side.push(copy(0, (), ()))
    assert side.landed.get_nowait() == (1, b"")
    side.transport.close()
    side.source.close()


def test_the_probe(pages: torch.Tensor) -> None:
    side = Side(pages)
    assert side.transport.probe() == pytest.approx(4 * 255 * PAGE_BYTES / 2e6)
    assert torch.equal(side.pool.pages[:, 0], pages[:, 0])
    assert not side.pool.pages[:, 1:].any()
    side.source.close()


@pytest.mark.parametrize(
    "verify",
    [
        Verify(1, 5, 0, 3, 0, (1, 2, 8)),
        Verify(1, 1 << 40, 1, 2, 7, (4,)),
        Verify(1, 5, 2, 1, 1, tuple(range(1, 9)) * 20),
        Verify(1, 5, 0, 3, 0, ()),
    ],
)
def test_a_decode_worker_digests_its_own(pages: torch.Tensor, verify: Verify) -> None:
    digester, answers = CudaDigester(pages), queue.SimpleQueue[bytes]()
    digester.start(verify, answers.put)
    digester.start(verify, answers.put)
    expected = verify_digests(pages, verify)
    assert [answers.get(timeout=10), answers.get(timeout=10)] == [expected, expected]
    digester.close()


def test_digests_that_cannot_be_computed_match_nothing(
    pages: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digester, answers = CudaDigester(pages), queue.SimpleQueue[bytes]()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("twostroke.kvtransfer.cuda_digester.digest_pages", fails)
    digester.start(Verify(1, 5, 0, 2, 0, (1, 2)), answers.put)
    assert answers.get_nowait() == bytes(32)
    assert "no kernel" in caplog.text
    digester.close()
