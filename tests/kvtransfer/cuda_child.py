"""A process of the tests with two: it owns a pool, or pushes into another's. Commands come as lines, answers go so.

`own DEVICE INCARNATION`: prints its descriptor; then for each line `TICKET LAYER ORDINAL PAGE,PAGE,...` the digests of
those pages, as the GPU says and as the CPU does. `push DEVICE INCARNATION DESCRIPTOR`: says `ready`, then pushes
without end.
"""

import queue
import sys

import torch

from twostroke.kvtransfer.cuda_digester import CudaDigester
from twostroke.kvtransfer.cuda_ipc import CudaIpcTransport
from twostroke.kvtransfer.cuda_pool import CudaPool, PeerCudaPool
from twostroke.kvtransfer.cuda_source import CudaSource
from twostroke.kvtransfer.messages import Copy, Verify
from twostroke.kvtransfer.pool_pages import verify_digests

LAYERS, PAGES, PAGE_BYTES = 4, 100, 256 << 10  # 100 MiB
NBYTES = LAYERS * PAGES * PAGE_BYTES


def say(*words: object) -> None:
    print(*words, flush=True)


def own(device: str, incarnation: int) -> None:
    pool = CudaPool.create(NBYTES, device=device, incarnation=incarnation)
    pages = pool.tensor.view(LAYERS, PAGES, PAGE_BYTES)
    digester = CudaDigester(pages)
    say(pool.descriptor.hex())
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for line in sys.stdin:
        ticket, layer, ordinal, ids = line.split()
        verify = Verify(1, int(ticket), int(layer), 1, int(ordinal), tuple(int(page) for page in ids.split(",")))
        digester.start(verify, answers.put)
        say(answers.get().hex(), verify_digests(pages, verify).hex())


def push(device: str, incarnation: int, descriptor: bytes) -> None:
    torch.cuda.set_device(device)
    pages = torch.randint(0, 256, (LAYERS, PAGES, PAGE_BYTES), dtype=torch.uint8, device=device)
    source = CudaSource(pages)
    pool = PeerCudaPool.open(descriptor, device=source.device, incarnation=incarnation, nbytes=NBYTES)
    transport = CudaIpcTransport(source, pool, PAGES)
    landed: queue.SimpleQueue[int] = queue.SimpleQueue()
    ids = tuple(range(1, PAGES))
    for layer in range(LAYERS):
        source.written(layer)
    say("ready")
    number = 0
    while True:
        for _ in range(8):
            number += 1
            transport.start(Copy(number, 1, number, number % LAYERS, 0, ids, ids), lambda n, _: landed.put(n))
        for _ in range(8):
            landed.get()


if __name__ == "__main__":
    what, device, incarnation, *rest = sys.argv[1:]
    if what == "own":
        own(device, int(incarnation))
    else:
        push(device, int(incarnation), bytes.fromhex(rest[0]))
