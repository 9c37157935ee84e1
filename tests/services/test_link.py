"""Links on real gRPC: handshakes that are refused, peers that do not keep to the protocol, streams that break."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.errors import HandoverExpired
from twostroke.kvtransfer import messages as kv
from twostroke.services.grpc_setup import open_channel
from twostroke.services.handover.handover import PeerAddress
from twostroke.services.handover.link_client import LinkClient
from twostroke.services.handover.link_server import LinkServer
from twostroke.services.handover.pool_opener import PoolOpener
from twostroke.services.handover.wire_link import PoolOffer
from twostroke.services.identity import PROTOCOL
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

from .handover_rig import GATEWAY, Rig, expected_tokens, form, random_prompt, running

HEARTBEAT = pb.FromDecode(heartbeat=pb.Heartbeat(sequence=1))


def decode_half(number: int, peer: PeerAddress) -> Request:
    return Request(
        SequenceKey(GATEWAY, number, 0, 0),
        [1, 2, 3, 4, 5],
        SamplingParams(temperature=0.0, max_tokens=4),
        Work.DECODE,
        writer=peer.incarnation,
    )


async def refusal(rig: Rig, peer: PeerAddress, number: int = 900) -> str:
    """Why a request for that writer fails."""
    request = decode_half(number, peer)
    rig.d.submit(request, peer)
    await rig.d.ended(request.key)
    error = rig.d.failures[request.key]
    assert isinstance(error, HandoverExpired)
    return error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("fingerprint", "0" * 64), ("kv_dtype", "bfloat16"), ("page_size", 8), ("layers", 2), ("kv_heads", 2)],
)
async def test_another_format_is_refused_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, value: Any
) -> None:
    caplog.set_level(logging.WARNING)
    async with running(tmp_path) as rig:
        rig.d.links.form = form(**{field: value})
        here = getattr(form(), field)
        assert await refusal(rig, rig.p.peer) == f"{field}: {here} here, {value} there"
        for number in range(3):
            assert field in await refusal(rig, rig.p.peer, number)
        assert sum("refused a link" in record.message for record in caplog.records) == 1
        await rig.d.all_whole()


async def test_the_decode_side_compares_too(tmp_path: Path) -> None:
    """A server that does not look would write what cannot be read."""
    async with running(tmp_path) as rig:
        rig.p.links._check = lambda hello: original(_with(hello, form()))  # type: ignore[method-assign]
        original = type(rig.p.links)._check.__get__(rig.p.links)
        rig.d.links.form = form(layers=7)
        assert await refusal(rig, rig.p.peer) == f"layers: 7 here, {form().layers} there"
        await rig.d.all_whole()


def _with(hello: pb.DecodeHello, changed: pb.ModelFormat) -> pb.DecodeHello:
    copy = pb.DecodeHello()
    copy.CopyFrom(hello)
    copy.format.CopyFrom(changed)
    return copy


async def test_another_incarnation_is_refused_for_good(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        stale = PeerAddress(rig.p.address, 5)
        assert "0000000000000005 expected" in await refusal(rig, stale)
        assert "0000000000000005 expected" in await refusal(rig, stale, 901)
        assert await rig.generate([1, 2, 3], 4) == expected_tokens([1, 2, 3], 4)
        await rig.whole()


async def test_a_pool_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        offer = rig.d.links._offer
        rig.d.links._offer = PoolOffer(offer.pool, offer.pages, offer.page_bytes, offer.descriptor + b"x")
        assert "pool" in await refusal(rig, rig.p.peer)
        await rig.d.all_whole()


async def test_pages_of_another_size_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        offer = rig.d.links._offer
        rig.d.links._offer = PoolOffer(offer.pool, offer.pages, 8, offer.descriptor)
        assert await refusal(rig, rig.p.peer) == f"page_bytes: {offer.page_bytes} here, 8 there"


async def test_nobody_at_the_address(tmp_path: Path) -> None:
    async with running(tmp_path, silence_s=0.3) as rig:
        nobody = PeerAddress("127.0.0.1:1", 5)
        assert await refusal(rig, nobody)
        assert await refusal(rig, nobody, 1)  # tried anew: it may be there by now
        assert not rig.d.links._links
        await rig.d.all_whole()


async def test_a_worker_that_is_not_ready_is_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        events, rig.p.links._events = rig.p.links._events, None
        key = rig.start([1, 2, 3], 4)
        await asyncio.sleep(0.3)
        assert not rig.d.links.standing()
        rig.p.links._events = events
        assert await rig.result(key) == expected_tokens([1, 2, 3], 4)


async def test_links_open_in_advance(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.d.links.want([rig.p.peer, rig.p.peer])
        await rig.link_stands()
        assert rig.d.links.standing() == [rig.p.identity.incarnation]
        rig.d.links.want([rig.p.peer])
        assert await rig.generate([1, 2, 3], 4) == expected_tokens([1, 2, 3], 4)
        assert len(rig.d.links._links) == 1


async def test_a_server_that_stops_and_comes_back(tmp_path: Path) -> None:
    """The same process at the same address: the link comes back and nothing was lost."""
    async with running(tmp_path) as rig:
        await rig.generate([1], 2)
        assert rig.p.server is not None
        await rig.p.server.stop(0)
        key = rig.start(random_prompt(1, 40), 5)
        await rig.p.until(lambda: key in rig.p.tokens)
        await rig.p.start_server()
        assert await rig.result(key) == expected_tokens(random_prompt(1, 40), 5)
        await rig.whole()


async def test_another_process_at_the_address_loses_what_is_open(tmp_path: Path) -> None:
    """Without a proof of the writer's death its pages stay held."""
    async with running(tmp_path) as rig:
        await rig.generate([1], 2)
        await rig.whole()
        _, decode = rig.requests(random_prompt(1, 40), 5)
        rig.d.submit(decode, rig.p)
        await rig.d.settled(lambda: rig.d.core.load().held_pages == 10)
        assert rig.p.server is not None
        await rig.p.server.stop(0)
        other = LinkServer(
            rig.p.identity.__class__(9, "other", rig.p.identity.pid, rig.p.identity.host),
            form(),
            rig.p.liveness,
            PoolOpener({"shm": lambda offer, incarnation, broken: pytest.fail("opened")}),
            page_bytes=rig.p.page_bytes,
        )
        other.attach(rig.p.handover)
        await rig.p.start_server(other)
        await rig.d.ended(decode.key)
        assert "incarnation" in str(rig.d.failures[decode.key])
        assert await rig.d.driver.call(lambda: rig.d.core.load().held_pages) == 10
        assert await rig.d.driver.call(lambda: rig.d.core.pool.quarantined) == 10


class RawLink:
    """A decode worker by hand."""

    def __init__(self, rig: Rig, channel: grpc.aio.Channel) -> None:
        self.hello = rig.d.links.hello(rig.p.peer)
        self.call: Any = worker_pb2_grpc.WorkerStub(channel).Link()

    async def stand(self) -> None:
        """Through the handshake."""
        await self.call.write(pb.FromDecode(hello=self.hello))
        assert (await self.call.read()).WhichOneof("kind") == "hello"
        await self.call.write(HEARTBEAT)
        assert (await self.call.read()).WhichOneof("kind") == "heartbeat"

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How it ended."""
        return await self.call.code(), await self.call.details()


@asynccontextmanager
async def raw_link(rig: Rig) -> AsyncIterator[RawLink]:
    async with open_channel(rig.p.address) as channel:
        link = RawLink(rig, channel)
        yield link
        link.call.cancel()


async def test_what_no_honest_peer_sends_ends_the_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, raw_link(rig) as link:
        await link.stand()
        ticket = pb.Ticket(ticket=1, key=pb.SequenceKey(), pool=link.hello.pool.pool, pages=[0], num_kv_heads=1)
        await link.call.write(pb.FromDecode(ticket=ticket))
        code, details = await link.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "pages" in details
        await rig.p.settled(lambda: rig.p.handover.writer.open_tickets() == 0)


@pytest.mark.parametrize(
    "first",
    [HEARTBEAT, pb.FromDecode(), pb.FromDecode(hello=pb.DecodeHello())],
    ids=["heartbeat", "nothing", "empty hello"],
)
async def test_a_first_message_that_is_no_hello(tmp_path: Path, first: pb.FromDecode) -> None:
    async with running(tmp_path) as rig, raw_link(rig) as link:
        await link.call.write(first)
        code, _ = await link.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_hello_that_never_comes(tmp_path: Path) -> None:
    async with running(tmp_path, silence_s=0.3) as rig, raw_link(rig) as link:
        code, details = await link.status()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "no hello" in details


async def test_a_peer_that_stops_after_its_hello(tmp_path: Path) -> None:
    """It is not up: nothing would prove its death. Its pool is let go."""
    async with running(tmp_path, silence_s=0.3) as rig, raw_link(rig) as link:
        await link.call.write(pb.FromDecode(hello=link.hello))
        await link.call.read()
        code, details = await link.status()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "no heartbeat" in details
        assert not rig.p.links._readers


async def test_the_newer_of_two_streams_of_a_peer_counts(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, raw_link(rig) as old, raw_link(rig) as new:
        await old.stand()
        await new.stand()
        assert (await old.status())[0] is grpc.StatusCode.OK
        rig.p.links.send({rig.d.identity.incarnation: [kv.Drained(7)]})
        while (message := await new.call.read()).WhichOneof("kind") == "heartbeat":
            pass
        assert message.drained.ticket == 7
        assert await rig.p.driver.call(lambda: len(rig.p.handover._pools._transports)) == 1


async def test_a_handshake_that_outlives_its_process_comes_to_nothing(tmp_path: Path) -> None:
    """Of two handshakes of one peer the second goes on when the first has proven its death."""
    async with running(tmp_path) as rig, raw_link(rig) as slow:
        await slow.call.write(pb.FromDecode(hello=slow.hello))
        assert (await slow.call.read()).WhichOneof("kind") == "hello"
        rig.p.links._dead[rig.d.identity.incarnation] = None
        await slow.call.write(HEARTBEAT)
        code, details = await slow.status()
        assert (code, "lost" in details) == (grpc.StatusCode.UNAVAILABLE, True)
        assert not rig.p.links._readers
        assert await rig.p.driver.call(lambda: not rig.p.handover._pools._transports)


async def test_one_incarnation_has_one_identity(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, raw_link(rig) as old, raw_link(rig) as new:
        await old.stand()
        new.hello.identity.name = "somebody else"
        await new.call.write(pb.FromDecode(hello=new.hello))
        code, details = await new.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "differently" in details


async def test_another_protocol_version_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, raw_link(rig) as link:
        link.hello.identity.protocol = PROTOCOL + 1
        await link.call.write(pb.FromDecode(hello=link.hello))
        code, details = await link.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"{PROTOCOL} here, {PROTOCOL + 1} there" in details


async def test_a_reader_that_takes_nothing_loses_its_stream_only(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, raw_link(rig) as link:
        rig.p.links._queue_limit = 100
        await link.stand()
        rig.p.links.send({rig.d.identity.incarnation: [kv.Drained(7, "x" * 1000)] * 101})
        assert (await link.status())[0] is grpc.StatusCode.UNAVAILABLE
        assert await rig.generate([1, 2, 3], 4) == expected_tokens([1, 2, 3], 4)


async def test_stopping_leaves_no_task(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with running(tmp_path) as rig:
        await rig.generate([1, 2, 3], 4)
        rig.d.links.want([PeerAddress("127.0.0.1:1", 5)])
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)
    assert {task for task in asyncio.all_tasks() - before if "grpc" not in repr(task.get_coro())} == set()


async def test_after_stop_nothing_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.generate([1, 2, 3], 4)
        client: LinkClient = rig.d.links
    client.want([rig.p.peer])
    client.send({rig.p.identity.incarnation: [kv.Revoke(1)]})
    await asyncio.sleep(0.05)
    assert not client._links
