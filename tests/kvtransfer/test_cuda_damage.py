"""Damage done in a pool on a GPU, at the destination: digests tell every page of it, and no other.

In short with the calls into CUDA replaced, where there is no GPU; else between two processes, on one GPU or on two.
"""

import sys
from collections.abc import Callable

import pytest
import torch

from twostroke.kvtransfer.messages import Copy, Verify
from twostroke.kvtransfer.pool_pages import verify_digests

from .device_pages import DevicePages
from .faulty_transport import DAMAGE, LATE, Faults, FaultyTransport

if torch.cuda.is_available():
    from .test_cuda_ipc_gpu import DEVICES, INCARNATION, Child, Writer, child, scattered, writer  # noqa: F401
else:
    from .test_cuda_source import LAYERS, Side, _no_cuda, copy, pages  # noqa: F401

DIGEST = 8
COPIES = 200  # of each kind of damage
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing is tried")


def differing(told: bytes, own: bytes, copy: Copy) -> set[tuple[int, int, int, int]]:
    """Pages whose digests differ, as `Faults.damaged` names them."""
    assert len(told) == len(own) == DIGEST * len(copy.dst)
    starts = range(0, len(told), DIGEST)
    wrong = [i for i, start in enumerate(starts) if told[start : start + DIGEST] != own[start : start + DIGEST]]
    return {(copy.reader, copy.ticket, 0, copy.ordinal + i) for i in wrong}


@on_cpu
@pytest.mark.parametrize("kind", [*DAMAGE, LATE])
def test_where_the_calls_are_replaced(kind: str, pages: torch.Tensor) -> None:
    side = Side(pages)
    faults = Faults((kind,), share=0.5, seed=3, target=lambda layer: DevicePages(side.pool.pages[layer]))
    side.transport = FaultyTransport(side.transport, faults)  # type: ignore[assignment]
    seen: set[tuple[int, int, int, int]] = set()
    for ticket in range(1, 25):
        one = copy(ticket % LAYERS)
        one = Copy(ticket, 1, ticket, one.layer, 5, one.src, one.dst)
        pages.random_(0, 256)
        side.source.written(one.layer)
        side.push(one)
        number, told = side.landed.get(timeout=10)
        assert number == ticket
        own = verify_digests(side.pool.pages, Verify(1, ticket, one.layer, 1, 5, one.dst))
        seen |= differing(told, own, one)
    assert seen == faults.damaged
    assert bool(seen) is (kind != LATE)
    assert bool(faults.delayed) is (kind == LATE)
    side.transport.close()
    side.source.close()


def test_rows_of_a_layer() -> None:
    layer = torch.arange(20, dtype=torch.uint8).view(5, 4).clone()
    rows = DevicePages(layer)
    read = rows[[3, 1]]
    assert read.tolist() == [[12, 13, 14, 15], [4, 5, 6, 7]]
    read[:] = 0
    assert layer.tolist()[3] == [12, 13, 14, 15]  # a copy
    rows[[4, 0]] = read + 9
    assert layer.tolist()[0] == layer.tolist()[4] == [9] * 4
    assert layer.tolist()[3] == [12, 13, 14, 15]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [*DAMAGE, LATE])
@pytest.mark.parametrize("device", DEVICES if torch.cuda.is_available() else [""])
def test_between_two_processes(
    device: str,
    kind: str,
    child: "Callable[..., Child]",
    writer: "Callable[[str], Writer]",
) -> None:
    owner = child("own", device, str(INCARNATION))
    here = writer(owner.first)
    faults = Faults((kind,), share=0.5, seed=7)
    here.transport = FaultyTransport(here.transport, faults)  # type: ignore[assignment]
    seen: set[tuple[int, int, int, int]] = set()
    for number in range(COPIES):
        one = scattered(number, number % here.source.layers)
        with torch.cuda.stream(here.engine):
            here.pages[one.layer].random_(0, 256)  # what lies there now is not what lay there before
            here.source.written(one.layer)
        here.push(one)
        done, told = here.landed.get(timeout=30)
        assert (done, told) == (number, here.expected(one))
        gpu, cpu = owner.digests(one)
        assert gpu == cpu
        seen |= differing(told, gpu, one)
    assert seen == faults.damaged
    assert bool(seen) is (kind != LATE)
    print(f"{device} {kind}: {len(seen)} pages of {COPIES * 40} damaged, all of them noticed", file=sys.stderr)
