"""Two processes and a GPU, or two: pages arrive bit for bit, in order with what computes, whoever dies."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

if torch.cuda.is_available():
    from twostroke.errors import Mismatch
    from twostroke.kvtransfer.cuda_digester import CudaDigester
    from twostroke.kvtransfer.cuda_ipc import CudaIpcTransport
    from twostroke.kvtransfer.cuda_pool import CudaPool, PeerCudaPool
    from twostroke.kvtransfer.cuda_runtime import BatchCopy
    from twostroke.kvtransfer.cuda_source import CudaSource
    from twostroke.kvtransfer.messages import Copy, Verify
    from twostroke.kvtransfer.page_batch import LayersAt, PageBatch
    from twostroke.kvtransfer.pool_pages import verify_digests

    from .cuda_child import LAYERS, NBYTES, PAGE_BYTES, PAGES

CHILD = Path(__file__).with_name("cuda_child.py")
INCARNATION = 0xABC
OURS = "cuda:0"
DEVICES = [OURS, *(["cuda:1"] if torch.cuda.device_count() > 1 else [])]  # of the other process
MIB = 1 << 20


class Child:
    """The other process."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, str(CHILD), *words]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.first = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the child has ended"
        return line

    def digests(self, copy: "Copy") -> tuple[bytes, bytes]:
        """Of the pages that `copy` wrote: by its GPU, by its CPU."""
        assert self.process.stdin is not None
        pages = ",".join(map(str, copy.dst))
        print(copy.ticket, copy.layer, copy.ordinal, pages, file=self.process.stdin, flush=True)
        gpu, cpu = self.line().split()
        return bytes.fromhex(gpu), bytes.fromhex(cpu)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def make(*words: str) -> Child:
        made.append(Child(*words))
        return made[-1]

    yield make
    for one in made:
        one.kill()
        for stream in (one.process.stdin, one.process.stdout):
            assert stream is not None
            stream.close()


class Writer:
    """This process as one that pushes."""

    def __init__(self, descriptor: str) -> None:
        torch.cuda.set_device(OURS)
        shape = (LAYERS, PAGES, PAGE_BYTES)
        self.pages = torch.randint(0, 256, shape, dtype=torch.uint8, device=OURS)
        self.source = CudaSource(self.pages)
        self.engine = torch.cuda.Stream()
        torch.cuda.synchronize()
        raw = bytes.fromhex(descriptor)
        self.pool = PeerCudaPool.open(raw, device=self.source.device, incarnation=INCARNATION, nbytes=NBYTES)
        self.transport = CudaIpcTransport(self.source, self.pool, PAGES)
        self.landed: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

    def written(self) -> None:
        with torch.cuda.stream(self.engine):
            for layer in range(LAYERS):
                self.source.written(layer)

    def push(self, copy: "Copy") -> None:
        self.transport.start(copy, lambda *told: self.landed.put(told))

    def expected(self, copy: "Copy") -> bytes:
        """Digests of the source, by torch."""
        return verify_digests(self.pages, Verify(1, copy.ticket, copy.layer, 1, copy.ordinal, copy.src))

    def close(self) -> None:
        self.transport.close()
        self.source.close()


@pytest.fixture
def writer() -> Iterator[Callable[[str], Writer]]:
    made: list[Writer] = []

    def make(descriptor: str) -> Writer:
        made.append(Writer(descriptor))
        return made[-1]

    yield make
    for one in made:
        one.close()


def scattered(number: int, layer: int, count: int = 40) -> "Copy":
    """Pages in no order, with some neighbours among them."""
    generator = torch.Generator().manual_seed(number)
    src = (torch.randperm(PAGES - 1, generator=generator)[:count] + 1).tolist()
    dst = (torch.randperm(PAGES - 1, generator=generator)[:count] + 1).tolist()
    src[5:9], dst[5:9] = sorted(src[5:9]), sorted(dst[5:9])
    return Copy(number, 1, 7 + number, layer, 3, tuple(src), tuple(dst))


def busy(seconds: float) -> None:
    """Keeps the current stream's device at work."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@pytest.mark.parametrize("device", DEVICES)
def test_pages_arrive_bit_for_bit(device: str, child: Callable[..., Child], writer: Callable[[str], Writer]) -> None:
    owner = child("own", device, str(INCARNATION))
    here = writer(owner.first)
    here.written()
    copies = [scattered(number, number % LAYERS) for number in range(12)]
    for copy in copies[-LAYERS:]:  # the last one of each layer: earlier ones would be written over
        here.push(copy)
        number, digests = here.landed.get(timeout=30)
        assert number == copy.copy
        assert digests == here.expected(copy)
        assert owner.digests(copy) == (digests, digests)


def test_all_layers_are_launched_at_once_and_end_in_order(
    child: Callable[..., Child], writer: Callable[[str], Writer]
) -> None:
    owner = child("own", DEVICES[-1], str(INCARNATION))
    here = writer(owner.first)
    here.written()
    ids = tuple(range(1, PAGES))
    copies = [Copy(layer, 1, 5, layer, 0, ids, ids) for layer in range(LAYERS)]
    for copy in copies:
        here.push(copy)
    ended = [here.landed.get(timeout=30) for _ in copies]
    assert ended == [(copy.copy, here.expected(copy)) for copy in copies]
    for copy, (_, digests) in zip(copies, ended, strict=True):
        assert owner.digests(copy) == (digests, digests)


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_waits_for_the_layers_write_and_for_nothing_behind_it(
    device: str, child: Callable[..., Child], writer: Callable[[str], Writer]
) -> None:
    owner = child("own", device, str(INCARNATION))
    here = writer(owner.first)
    copy = scattered(1, 2)
    with torch.cuda.stream(here.engine):
        busy(0.1)
        here.pages[2].random_(0, 256)  # the layer's write, behind what computes
        here.source.written(2)
        busy(0.5)  # the rest of the step
        end = torch.cuda.Event()
        end.record()
    here.push(copy)
    _, digests = here.landed.get(timeout=30)
    assert not end.query()  # the step still runs
    torch.cuda.synchronize()
    assert digests == here.expected(copy)
    assert owner.digests(copy) == (digests, digests)


def test_a_pool_is_let_go_of_only_once_its_copies_ended(
    child: Callable[..., Child], writer: Callable[[str], Writer]
) -> None:
    owner = child("own", DEVICES[-1], str(INCARNATION))
    here = writer(owner.first)
    with torch.cuda.stream(here.engine):
        busy(0.2)
    here.written()
    copy = scattered(1, 0)
    here.push(copy)
    here.transport.close()
    assert here.landed.get_nowait()[0] == copy.copy
    with pytest.raises(ValueError, match="closed"):
        here.push(copy)
    here.transport.close()
    digests = here.expected(copy)
    assert owner.digests(copy) == (digests, digests)


def test_a_pool_of_another_incarnation_or_size_is_refused(child: Callable[..., Child]) -> None:
    raw = bytes.fromhex(child("own", OURS, str(INCARNATION)).first)
    device = torch.device(OURS)
    with pytest.raises(Mismatch, match="expected that of"):
        PeerCudaPool.open(raw, device=device, incarnation=INCARNATION + 1, nbytes=NBYTES)
    with pytest.raises(Mismatch, match=r"bytes, expected"):
        PeerCudaPool.open(raw, device=device, incarnation=INCARNATION, nbytes=NBYTES + 1)
    with pytest.raises(Mismatch, match="cannot be mapped"):
        PeerCudaPool.open(raw[:40] + bytes(48), device=device, incarnation=INCARNATION, nbytes=NBYTES)


@pytest.mark.parametrize("device", DEVICES)
def test_an_owner_that_is_killed_under_copies_costs_its_memory_until_it_is_let_go_of(
    device: str, child: Callable[..., Child], writer: Callable[[str], Writer]
) -> None:
    owner = child("own", device, str(INCARNATION))
    here = writer(owner.first)
    here.written()
    ids = tuple(range(1, PAGES))
    copies = [Copy(number, 1, 5, number % LAYERS, 0, ids, ids) for number in range(64)]
    for copy in copies[:32]:
        here.push(copy)
    owner.kill()
    for copy in copies[32:]:  # its pool is memory as before
        here.push(copy)
    assert [here.landed.get(timeout=30)[0] for _ in copies] == [copy.copy for copy in copies]
    torch.cuda.synchronize()
    held = settled(device)
    here.transport.close()
    assert NBYTES - 4 * MIB <= settled(device) - held <= NBYTES + 64 * MIB
    successor = child("own", device, str(INCARNATION))
    again = writer(successor.first)
    again.written()
    copy = scattered(3, 1)
    again.push(copy)
    _, digests = again.landed.get(timeout=30)
    assert successor.digests(copy) == (digests, digests)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dst", [tuple(range(1, 90)), tuple(range(89, 0, -1)), (5, 6, 7, 3, 99, 1, 2, 50)])
def test_a_stretch_of_layers_arrives_whole(
    device: str, dst: tuple[int, ...], child: Callable[..., Child], writer: Callable[[str], Writer]
) -> None:
    owner = child("own", device, str(INCARNATION))
    here = writer(owner.first)
    here.written()
    src = tuple(range(3, 3 + len(dst)))
    copies = [Copy(layer, 1, 9, layer, 0, src, dst) for layer in range(1, LAYERS)]
    landed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    here.transport.start_layers(copies, landed.put)
    digests = landed.get(timeout=30)
    assert digests == b"".join(here.expected(copy) for copy in copies)
    assert digests == b"".join(owner.digests(copy)[0] for copy in copies)
    untouched = Copy(1, 1, 9, 0, 0, (1,), (dst[0],))
    assert owner.digests(untouched)[0] == verify_digests(torch.zeros_like(here.pages), Verify(1, 9, 0, 1, 0, dst[:1]))


def test_layers_may_lie_far_apart() -> None:
    """As in a large pool: more than 32 bits from one to the next."""
    torch.cuda.set_device(OURS)
    page, pages, layers = 256 << 10, 17_000, 3  # 4.2 GiB a layer
    pool = torch.zeros((layers, pages, page), dtype=torch.uint8, device=OURS)
    src, dst = (1, 2, 9_000, 16_999), (700, 701, 12_345, 3)
    for layer in range(layers):
        pool[layer, list(src)] = torch.randint(1, 256, (len(src), page), dtype=torch.uint8, device=OURS)
    batch, stream = PageBatch(src, dst, page), torch.cuda.Stream()
    at = LayersAt(pool.data_ptr(), pages)
    torch.cuda.synchronize()
    BatchCopy()(batch.place(layers, at, at), len(batch), stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(pool[:, list(dst)], pool[:, list(src)])
    touched = {*src, *dst}
    for layer in range(layers):
        assert not pool[layer, [p for p in range(0, pages, 50) if p not in touched]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_no_byte_changes_once_a_writer_is_dead(device: str, child: Callable[..., Child]) -> None:
    torch.cuda.set_device(OURS)
    pool = CudaPool.create(NBYTES, device=OURS, incarnation=INCARNATION)
    pages = pool.tensor.view(LAYERS, PAGES, PAGE_BYTES)
    digester, answers = CudaDigester(pages), queue.SimpleQueue[bytes]()
    verify = Verify(1, 1, 0, LAYERS, 0, tuple(range(PAGES)))

    def now() -> bytes:
        digester.start(verify, answers.put)
        return answers.get(timeout=30)

    other = child("push", device, str(INCARNATION), pool.descriptor.hex())
    assert other.first == "ready"
    first = now()
    while now() == first:  # it writes
        pass
    other.kill()
    seen = [now() for _ in range(200)]
    assert len(set(seen)) == 1
    assert seen[0] == verify_digests(pages, verify)
    assert not pages[:, 0].any()  # the sink was never written
    digester.close()
    pool.close()


def settled(device: str) -> int:
    """Bytes that are free once that does not change: drivers take memory back some time after a process died."""
    last, free = -1, torch.cuda.mem_get_info(device)[0]
    while free != last:
        time.sleep(0.7)
        last, free = free, torch.cuda.mem_get_info(device)[0]
    return free


@pytest.mark.parametrize("device", DEVICES)
def test_the_probe_measures(device: str, child: Callable[..., Child], writer: Callable[[str], Writer]) -> None:
    owner = child("own", device, str(INCARNATION))
    here = writer(owner.first)
    speed = here.transport.probe()
    assert 1 < speed < 5000
    copy = Copy(1, 1, 1, 0, 0, (0,), (0,))
    assert owner.digests(copy)[0] == here.expected(copy)  # page 0 alone was written
