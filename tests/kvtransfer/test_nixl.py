"""Pages over NIXL into the pool of another process, which is killed, frozen, or takes its pool back."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twostroke.errors import Mismatch, Unavailable
from twostroke.kernels.digest import page_digests
from twostroke.kvtransfer.messages import Copy
from twostroke.kvtransfer.nixl import NixlTransport
from twostroke.kvtransfer.nixl_agent import why_missing
from twostroke.kvtransfer.nixl_export import MAX_METADATA, NixlExport, NixlPool
from twostroke.kvtransfer.nixl_source import NixlSource, Write

pytestmark = pytest.mark.skipif(bool(why_missing()), reason=why_missing() or "there")

LAYERS, SRC, DST, BYTES = 3, 40, 60, 1 << 16
OURS, THEIRS = 5, 9
SRC_IDS = (*range(3, 20), 30, 25)
DST_IDS = (*range(40, 57), 1, 2)
ANSWER_S = 30.0
BOTH = pytest.mark.parametrize("tls", ["tcp", ""], indirect=True)


class Peer:
    """The child and what it says."""

    def __init__(self, device: str = "cpu") -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, str(Path(__file__).with_name("nixl_child.py"))]
        paths = os.pathsep.join([str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [*command, *map(str, (LAYERS, DST, BYTES, THEIRS)), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.descriptor = self._line()

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return bytes.fromhex(self.process.stdout.readline().decode())

    def ask(self, line: str) -> bytes:
        """One answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return self._line()

    def pool(self) -> Tensor:  # [LAYERS, DST, BYTES] uint8
        """As it is now."""
        return torch.frombuffer(bytearray(self.ask("pool")), dtype=torch.uint8).view(LAYERS, DST, BYTES)

    def kill(self) -> None:
        """Dead, and seen to be."""
        self.process.kill()
        self.process.wait()


class Landings:
    """What `done` told."""

    def __init__(self) -> None:
        self.told: dict[int, bytes] = {}
        self.news = threading.Condition()

    def done(self, copy: int, digests: bytes) -> None:
        with self.news:
            assert copy not in self.told
            assert threading.current_thread().name == "kv-nixl"
            self.told[copy] = digests
            self.news.notify_all()

    def wait(self, count: int, seconds: float = ANSWER_S) -> bool:
        with self.news:
            return self.news.wait_for(lambda: len(self.told) >= count, seconds)


@pytest.fixture(name="tls", params=["tcp"])
def _tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """TCP as between hosts, and what UCX takes within one."""
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture(name="source")
def _source(tls: str) -> Iterator[NixlSource]:
    torch.manual_seed(1)
    source = NixlSource(torch.randint(1, 256, (LAYERS, SRC, BYTES), dtype=torch.uint8), OURS)
    yield source
    source.close()


@pytest.fixture(name="peer")
def _peer(tls: str) -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.kill()


@pytest.fixture(name="broken")
def _broken() -> threading.Event:
    return threading.Event()


@pytest.fixture(name="transport")
def _transport(source: NixlSource, peer: Peer, broken: threading.Event) -> Iterator[NixlTransport]:
    transport = opened(source, peer.descriptor, broken)
    yield transport
    transport.close()


def opened(source: NixlSource, descriptor: bytes, broken: threading.Event) -> NixlTransport:
    return NixlTransport(source, descriptor, incarnation=THEIRS, pages=DST, broken=broken.set)


def copy(number: int, layer: int, src: tuple[int, ...] = SRC_IDS, dst: tuple[int, ...] = DST_IDS) -> Copy:
    return Copy(number, THEIRS, 7, layer, 2, src, dst)


@BOTH
def test_copies_these_pages_and_nothing_else(source: NixlSource, transport: NixlTransport, peer: Peer) -> None:
    landings, writes = Landings(), []
    post = source.post

    def counting(write: Write) -> None:
        writes.append(write)
        post(write)

    source.post = counting  # type: ignore[method-assign]
    for layer in range(LAYERS):
        transport.start(copy(layer, layer), landings.done)
    assert landings.wait(LAYERS)
    pool, expected = peer.pool(), torch.zeros((LAYERS, DST, BYTES), dtype=torch.uint8)
    expected[:, list(DST_IDS)] = source.tensor[:, list(SRC_IDS)]
    assert torch.equal(pool, expected)
    for layer, digests in landings.told.items():
        assert digests == page_digests(pool[layer], DST_IDS, ticket=7, layer=layer, ordinal=2)
    assert [len(write.local) for write in writes] == [3] * LAYERS  # neighbours go as one
    assert transport.probe() > 0
    assert torch.equal(peer.pool()[:, 1:], expected[:, 1:])


@pytest.mark.parametrize(
    ("layer", "src", "dst"),
    [(0, [1], [0]), (0, [1], [DST]), (0, [1, SRC], [1, 2]), (0, [-1], [1]), (0, [1], [-1]), (LAYERS, [1], [1]),
     (-1, [1], [1]), (0, [1, 2], [1]), (0, [], [1])],
)  # fmt: skip
def test_out_of_range_starts_nothing(layer: int, src: list[int], dst: list[int]) -> None:
    source, pool = NixlSource(torch.zeros((LAYERS, SRC, 64), dtype=torch.uint8), OURS), torch.zeros(LAYERS * DST * 64)
    export = NixlExport(pool.to(torch.uint8), THEIRS)
    try:
        transport = NixlTransport(source, export.descriptor, incarnation=THEIRS, pages=DST, broken=lambda: None)
        with pytest.raises(ValueError, match=r"page|layer|onto"):
            transport.start(copy(1, layer, tuple(src), tuple(dst)), lambda number, digests: pytest.fail("done"))
        transport.start(copy(1, 0, (), ()), lambda number, digests: None)
        transport.close()
        with pytest.raises(ValueError, match="closed"):
            transport.start(copy(1, 0), lambda number, digests: pytest.fail("done"))
    finally:
        export.close()
        source.close()


def test_a_killed_reader_ends_what_was_started(transport: NixlTransport, peer: Peer, broken: threading.Event) -> None:
    landings = Landings()
    transport.start(copy(0, 0), landings.done)
    assert landings.wait(1)
    peer.kill()
    for number in range(1, 9):
        transport.start(copy(number, number % LAYERS), landings.done)
    assert broken.wait(ANSWER_S)
    transport.peer_gone()
    assert landings.wait(9)
    assert landings.told[8] == bytes(8 * len(DST_IDS))
    transport.start(copy(9, 0), landings.done)
    assert landings.wait(10)
    with pytest.raises(Unavailable):
        transport.probe()
    transport.close()


def test_copies_into_a_frozen_reader_wait_for_its_end(
    transport: NixlTransport, peer: Peer, broken: threading.Event
) -> None:
    landings = Landings()
    os.kill(peer.process.pid, signal.SIGSTOP)
    try:
        for number in range(200):
            transport.start(copy(number, number % LAYERS), landings.done)
        assert not landings.wait(200, 0.3)
    finally:
        peer.kill()
    assert broken.wait(ANSWER_S)
    assert len(landings.told) < 200  # those that failed: nothing is proven yet
    transport.peer_gone()
    assert landings.wait(200)


def test_a_frozen_reader_that_comes_back(transport: NixlTransport, source: NixlSource, peer: Peer) -> None:
    landings = Landings()
    os.kill(peer.process.pid, signal.SIGSTOP)
    for layer in range(LAYERS):
        transport.start(copy(layer, layer), landings.done)
    os.kill(peer.process.pid, signal.SIGCONT)
    assert landings.wait(LAYERS)
    assert torch.equal(peer.pool()[:, list(DST_IDS)], source.tensor[:, list(SRC_IDS)])


@BOTH
def test_a_closed_export_cannot_be_written_and_a_new_one_can(
    source: NixlSource, transport: NixlTransport, peer: Peer, broken: threading.Event
) -> None:
    landings = Landings()
    for number in range(30):
        transport.start(copy(number, number % LAYERS), landings.done)
    descriptor = peer.ask("renew")
    before = peer.pool()
    source.tensor[:] = 0
    for number in range(30, 60):
        transport.start(copy(number, number % LAYERS), landings.done)
    assert broken.wait(ANSWER_S)
    assert 59 not in landings.told  # it failed, and is not done before the peer is known to have closed the export
    renewed = opened(source, descriptor, threading.Event())
    transport.peer_gone()
    assert landings.wait(60)
    assert landings.told[59] == bytes(8 * len(DST_IDS))
    assert torch.equal(peer.pool(), before)
    again = Landings()
    renewed.start(copy(60, 1), again.done)
    assert again.wait(1)
    assert not peer.pool()[1, list(DST_IDS)].any()
    renewed.close()


def test_nothing_is_told_after_close(transport: NixlTransport, peer: Peer) -> None:
    landings = Landings()
    for number in range(40):
        transport.start(copy(number, number % LAYERS), landings.done)
    transport.close()
    assert len(landings.told) == 40


def test_descriptors_of_others_are_refused() -> None:
    pool = NixlPool("twostroke-0000000000000009-1", 4096, 640, 0, False, b"metadata")
    packed = pool.pack(9)
    assert NixlPool.unpack(packed, incarnation=9, nbytes=640) == pool
    for wrong, named in [
        (b"", "0 bytes"),
        (packed[:20], "20 bytes"),
        (packed + bytes(MAX_METADATA), "bytes"),
        (b"x" + packed[1:], "not a NIXL descriptor"),
        (pool.pack(8), "0000000000000008, expected 640 bytes of 0000000000000009"),
        (NixlPool("twostroke-0000000000000008-1", 4096, 640, 0, False, b"m").pack(9), "NIXL agent"),
        (NixlPool("twostroke-0000000000000009-1", 4096, 64, 0, False, b"m").pack(9), "64 bytes"),
        (NixlPool("twostroke-0000000000000009-1", (1 << 64) - 8, 640, 0, False, b"m").pack(9), "memory"),
    ]:
        with pytest.raises(Mismatch, match=named):
            NixlPool.unpack(wrong, incarnation=9, nbytes=640)


def test_metadata_of_another_agent_is_refused(source: NixlSource, peer: Peer) -> None:
    known = NixlPool.unpack(peer.descriptor, incarnation=THEIRS, nbytes=LAYERS * DST * BYTES)
    for wrong in (known.metadata[:40], b"no metadata", bytes(len(known.metadata))):
        with pytest.raises(Mismatch):
            source.agent.add(wrong, known.agent)
    with pytest.raises(Mismatch, match="expected"):
        source.agent.add(known.metadata, "twostroke-0000000000000009-77")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ours", ["cpu", "cuda"])
@pytest.mark.parametrize("theirs", ["cpu", "cuda"])
def test_pools_in_a_gpu(ours: str, theirs: str) -> None:
    """What the engine's stream has launched before a copy is in it; the digests are those of a CPU's."""
    peer = Peer(theirs)
    source = NixlSource(torch.zeros((LAYERS, SRC, BYTES), dtype=torch.uint8, device=ours), OURS)
    transport = opened(source, peer.descriptor, threading.Event())
    try:
        landings = Landings()
        assert transport.probe() > 0
        for layer in range(LAYERS):
            source.tensor[layer].random_(1, 256)
            transport.start(copy(layer, layer), landings.done)
        assert landings.wait(LAYERS)
        pool = peer.pool()
        assert torch.equal(pool[:, list(DST_IDS)], source.tensor[:, list(SRC_IDS)].cpu())
        assert not pool[:, 20:40].any()
        for layer, digests in landings.told.items():
            assert digests == page_digests(pool[layer], DST_IDS, ticket=7, layer=layer, ordinal=2)
    finally:
        transport.close()
        source.close()
        peer.kill()
