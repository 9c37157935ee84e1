"""The transport's own part, over a source that launches nothing: what goes where, and when the pool is let go of."""

import threading
from collections.abc import Callable, Sequence

import pytest

from twostroke.errors import Mismatch, TwostrokeError
from twostroke.kvtransfer.cuda_ipc import CudaIpcTransport
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.page_batch import LayersAt, PageBatch
from twostroke.kvtransfer.transport import LayersTransport

LAYERS, PAGES, PEER_PAGES, PAGE = 3, 10, 20, 1 << 12
ADDRESS = 7 << 40


class Source:
    """Launches nothing; tells that copies have landed when the test says so."""

    layers, pages, page_bytes, layer_bytes, address = LAYERS, PAGES, PAGE, PAGES * PAGE, 1 << 40

    def __init__(self) -> None:
        self.pushed: list[tuple[Sequence[Copy], PageBatch, LayersAt, Callable[[bytes], None]]] = []
        self.measured: list[tuple[PageBatch, int, LayersAt]] = []
        self.fails = False

    def push(self, copies: Sequence[Copy], batch: PageBatch, target: LayersAt, landed: Callable[[bytes], None]) -> None:
        if self.fails:
            raise RuntimeError("no")
        self.pushed.append((copies, batch, target, landed))

    def land(self) -> None:
        for copies, _, _, landed in self.pushed:
            landed(b"12345678" * sum(len(copy.src) for copy in copies))

    def measure(self, batch: PageBatch, layers: int, target: LayersAt) -> float:
        self.measured.append((batch, layers, target))
        return float(len(batch.src))


class Pool:
    """A mapping that remembers its end."""

    address, nbytes = ADDRESS, LAYERS * PEER_PAGES * PAGE

    def __init__(self) -> None:
        self.closed = 0
        self.error: Exception | None = None

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


def copy(number: int, layer: int = 0) -> Copy:
    return Copy(number, 9, 1, layer, 0, (1, 2), (11, 12))


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def transport(source: Source, pool: Pool) -> CudaIpcTransport:
    return CudaIpcTransport(source, pool, PEER_PAGES)  # type: ignore[arg-type]


def test_a_pool_of_another_size_is_refused(source: Source, pool: Pool) -> None:
    with pytest.raises(Mismatch, match="3 layers x 21 pages x 4096 bytes"):
        CudaIpcTransport(source, pool, PEER_PAGES + 1)  # type: ignore[arg-type]


def test_a_copy_is_done_once_the_host_has_seen_it(transport: CudaIpcTransport, source: Source) -> None:
    done: list[tuple[int, bytes]] = []
    for layer in range(LAYERS):
        transport.start(copy(layer + 1, layer), lambda *told: done.append(told))
    assert done == []
    targets = [LayersAt(ADDRESS + n * PEER_PAGES * PAGE, PEER_PAGES) for n in range(3)]
    assert [target for _, _, target, _ in source.pushed] == targets
    assert len({id(batch) for _, batch, _, _ in source.pushed}) == 1
    source.land()
    assert done == [(number, b"12345678" * 2) for number in (1, 2, 3)]


def test_layers_go_together(transport: CudaIpcTransport, source: Source) -> None:
    done: list[bytes] = []
    assert isinstance(transport, LayersTransport)
    copies = [copy(layer + 1, layer) for layer in (1, 2)]
    transport.start_layers(copies, done.append)
    [(pushed, batch, target, _)] = source.pushed
    assert (pushed, batch.src, batch.dst) == (copies, (1, 2), (11, 12))
    assert target == LayersAt(ADDRESS + PEER_PAGES * PAGE, PEER_PAGES)
    source.land()
    assert done == [b"12345678" * 4]
    for layers in ((2, 3), (-1, 0)):
        with pytest.raises(ValueError, match="no layer"):
            transport.start_layers([copy(1, layer) for layer in layers], done.append)
    transport.close()


def test_a_copy_that_cannot_be_launched_raises_and_is_not_done(
    transport: CudaIpcTransport, source: Source, pool: Pool
) -> None:
    done: list[int] = []
    with pytest.raises(ValueError, match="layer"):
        transport.start(copy(1, LAYERS), lambda *told: done.append(1))
    source.fails = True
    with pytest.raises(RuntimeError, match="no"):
        transport.start(copy(1), lambda *told: done.append(1))
    transport.close()
    assert (done, pool.closed) == ([], 1)


def test_closing_waits_for_what_was_started(transport: CudaIpcTransport, source: Source, pool: Pool) -> None:
    done: list[int] = []
    transport.start(copy(1), lambda number, _: done.append(number))
    closing = threading.Thread(target=transport.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert pool.closed == 0
    source.land()
    closing.join()
    assert (done, pool.closed) == ([1], 1)
    transport.close()
    assert pool.closed == 1
    with pytest.raises(ValueError, match="closed"):
        transport.start(copy(2), lambda *told: None)


def test_a_copy_that_never_ends_leaves_the_pool_mapped(
    transport: CudaIpcTransport, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twostroke.kvtransfer.cuda_ipc._CLOSE_S", 0.01)
    transport.start(copy(1), lambda *told: None)
    transport.close()
    assert pool.closed == 0
    assert "stays mapped" in caplog.text


def test_a_receiver_that_fails_does_not_keep_the_pool(transport: CudaIpcTransport, source: Source, pool: Pool) -> None:
    def fails(number: int, digests: bytes) -> None:
        raise RuntimeError("no")

    transport.start(copy(1), fails)
    with pytest.raises(RuntimeError, match="no"):
        source.land()
    transport.close()
    assert pool.closed == 1


def test_a_device_that_failed_is_logged_at_the_end(
    transport: CudaIpcTransport, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.error = TwostrokeError("cudaIpcCloseMemHandle failed")
    transport.close()
    assert "could not be unmapped" in caplog.text


def test_the_probe_touches_page_0_only(transport: CudaIpcTransport, source: Source) -> None:
    assert transport.probe() == 256 // LAYERS
    ((batch, layers, target),) = source.measured
    assert set(batch.src) == set(batch.dst) == {0}
    assert (layers, target) == (LAYERS, LayersAt(ADDRESS, PEER_PAGES))
