"""Sessions with workers: handshake, refusal, silence, reconnection, peers, what is dropped."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from twostroke.engine.request import SamplingParams, SequenceKey, SequenceOutput, Token, Work
from twostroke.errors import Mismatch, Unavailable
from twostroke.services.gateway.fleet import Fleet
from twostroke.services.gateway.inbox import Event, Failed, Gone, Inbox, Output
from twostroke.services.gateway.router import Role
from twostroke.services.gateway.turns import Turns
from twostroke.services.gateway.wire_gateway import make_submit
from twostroke.services.gateway.worker_client import PATIENCE_S, WorkerClient, _ending, _write
from twostroke.services.gateway.worker_session import WorkerSession
from twostroke.services.grpc_setup import open_channel
from twostroke.services.identity import ProcessIdentity, draw_identity
from twostroke.services.worker.wire import pack_step
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc

from ..cluster import until
from ..stand_in_worker import Script, StandIn

GATEWAY = draw_identity("gateway-0", "test-host")


@asynccontextmanager
async def fleet(*workers: Any, silence_s: float = 10.0, model: str = "llama") -> AsyncIterator[Fleet]:
    """A fleet that connects to the workers; those that do not serve yet are started."""
    addresses = [worker.address if worker.serves else await worker.start() for worker in workers]
    it = Fleet(addresses, GATEWAY, model, silence_s=silence_s)
    it.start()
    try:
        yield it
    finally:
        await it.stop()
        for worker in workers:
            await worker.stop()


def inbox() -> Inbox:
    return Inbox(1 << 20, lambda: None, Turns())


async def taken(box: Inbox) -> list[Event]:
    await box.arrival()
    return box.take()


def key(request: int, attempt: int = 0) -> SequenceKey:
    return SequenceKey(GATEWAY.incarnation, request, 0, attempt)


def submit(session: WorkerSession, name: SequenceKey, box: Inbox) -> None:
    session.submit(name, make_submit(name, Work.ALL, [1, 2], SamplingParams(max_tokens=5)), box)


async def test_handshake_tells_what_the_worker_is() -> None:
    worker = StandIn("decode", "d0", pages=77)
    async with fleet(worker) as it:
        await until(it.loads)
        load = it.loads()[0]
        assert (load.name, load.role.name, load.pages, load.free_pages) == ("d0", "DECODE", 77, 77)
        assert it.session(worker.identity.incarnation).peer.address == worker.address
        assert it.can_decode
        assert not it.count(Role.PREFILL)


async def test_a_worker_of_another_format_is_refused_with_both_values() -> None:
    first, second = StandIn("prefill", "p0"), StandIn("decode", "d0", kv_dtype="bfloat16")
    async with fleet(first, second) as it:
        await until(lambda: "refused" in it.unavailable().message)
        name, ours, theirs = ("d0", "float32", "bfloat16") if it.count(Role.PREFILL) else ("p0", "bfloat16", "float32")
        assert f"{name} refused: kv_dtype {ours} here, {theirs} there" in it.unavailable().message


@pytest.mark.parametrize(
    ("field", "value"), [("page_size", 32), ("layers", 3), ("fingerprint", "f"), ("head_dim", 8), ("kv_heads", 1)]
)
async def test_each_field_of_the_format_counts(field: str, value: Any) -> None:
    first, second = StandIn("both", "b0"), StandIn("both", "b1", **{field: value})
    async with fleet(first, second) as it:
        await until(lambda: f"refused: {field} " in it.unavailable().message)
        assert len(it.loads()) == 1


async def test_another_model_is_refused_by_the_worker_and_a_worker_of_no_known_role_by_us() -> None:
    worker, odd = StandIn("both", "b0"), StandIn("both", "b1")
    hello = odd.hello

    def without_role() -> pb.WorkerHello:
        message = hello()
        message.role = pb.ROLE_UNSPECIFIED
        message.format.model = "other"
        return message

    odd.hello = without_role  # type: ignore[method-assign]
    odd.format.model = "other"
    async with fleet(worker, odd, model="other") as it:
        await until(lambda: "'llama' here, 'other' there" in it.unavailable().message)
        await until(lambda: "role 0" in it.unavailable().message)
        assert not it.loads()


async def test_a_worker_that_is_not_ready_is_met_when_it_is() -> None:
    worker = StandIn("both", "b0")
    worker.ready = False
    async with fleet(worker) as it:
        await until(lambda: "not ready" in it.unavailable().message)
        worker.ready = True
        await until(it.loads)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """(level, text) of what clients of workers logged."""
    name = "twostroke.services.gateway.worker_client"
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == name]


async def test_a_worker_that_starts_is_waited_for_and_one_that_left_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="twostroke")
    worker = StandIn("both", "b0")
    address = await worker.start()
    await worker.stop()
    async with fleet(Somewhere(address)) as it:
        await until(lambda: told(caplog))
        await worker.start(address)
        await until(it.loads)
        assert told(caplog)[0] == ("INFO", f"waiting for worker {address}: Connection refused")
        assert {level for level, _ in told(caplog)} == {"INFO"}
        await worker.stop()
        await until(lambda: len([1 for level, _ in told(caplog) if level == "WARNING"]) >= 2)
        assert told(caplog)[-1] == ("WARNING", f"worker {address}: Connection refused")


class Somewhere:
    """Stands for an address in `fleet`: whoever serves there is the test's own affair."""

    serves = True

    def __init__(self, address: str) -> None:
        self.address = address

    async def stop(self) -> None:
        """Not ours to stop."""


def test_a_worker_that_never_comes_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="twostroke")
    now = 100.0
    client = WorkerClient(
        "h:1", GATEWAY, "llama", Fleet([], GATEWAY, "llama", silence_s=1), silence_s=1, clock=lambda: now
    )
    client._note("Connection refused", absent=True)
    client._note("Connection refused", absent=True)
    now += PATIENCE_S
    client._note("Connection refused", absent=True)
    client._note("Connection refused", absent=True)
    assert told(caplog) == [
        ("INFO", "waiting for worker h:1: Connection refused"),
        ("WARNING", "worker h:1: not met in 60 s: Connection refused"),
    ]
    client._note("refused: another model")
    assert told(caplog)[-1] == ("WARNING", "worker h:1: refused: another model")


async def test_one_worker_at_two_addresses_is_one() -> None:
    worker = StandIn("both", "b0")
    port = (await worker.start()).rpartition(":")[2]
    it = Fleet([worker.address, f"localhost:{port}"], GATEWAY, "llama", silence_s=10)
    it.start()
    await until(lambda: "connected already" in it.unavailable().message)
    assert len(it.loads()) == 1
    await it.stop()
    await worker.stop()


async def test_nobody_there_is_said() -> None:
    it = Fleet(["127.0.0.1:1"], GATEWAY, "llama", silence_s=10)
    it.start()
    await until(lambda: "127.0.0.1:1: Connection refused" in it.unavailable().message)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        it.largest()
    await it.stop()


async def test_a_worker_that_dies_and_comes_back_is_met_again() -> None:
    worker = StandIn("both", "b0", Script(mute_after=1))
    async with fleet(worker) as it:
        await until(it.loads)
        session, box = it.session(worker.identity.incarnation), inbox()
        submit(session, key(1), box)
        assert isinstance((await taken(box))[0], Output)
        await worker.stop()
        events = await taken(box)
        assert isinstance(events[-1], Gone)
        await until(lambda: not it.loads())
        with pytest.raises(Unavailable):
            submit(session, key(2), box)
        worker.identity = draw_identity("b0", "test-host")
        await worker.start(worker.address)
        await until(it.loads)
        assert it.loads()[0].incarnation == worker.identity.incarnation


async def test_a_silent_worker_is_taken_for_dead() -> None:
    worker = StandIn("both", "b0", Script(mute_after=0))
    async with fleet(worker, silence_s=1.0) as it:
        await until(it.loads)
        box = inbox()
        submit(it.session(worker.identity.incarnation), key(1), box)
        worker.frozen = True
        gone = (await taken(box))[-1]
        assert isinstance(gone, Gone)
        assert "silent" in gone.reason
        await until(lambda: not worker.live)  # the stream's end drops the request there


async def test_a_write_to_a_call_that_has_ended_ends_the_session_with_the_call_s_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The writer may run before the reader learns that the worker died."""
    worker = StandIn("decode", "d0")
    async with open_channel(await worker.start()) as channel:
        call: Any = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(pb.ToWorker(hello=pb.GatewayHello(identity=GATEWAY.message(), model="llama")))
        session = WorkerSession((await call.read()).hello, GATEWAY.incarnation)
        await worker.stop()
        assert await call.code() is not grpc.StatusCode.OK
        session.beat()
        await _ending(session, _write(call, session))
        assert session.ended.result().startswith(f"{(await call.code()).name}: ")
        assert not caplog.records


async def test_heartbeats_go_out_when_nothing_else_does() -> None:
    worker = StandIn("both", "b0")
    async with fleet(worker):
        await until(lambda: worker.heartbeats >= 1)


async def test_decode_workers_learn_of_prefill_workers() -> None:
    prefill, decode, both = StandIn("prefill", "p0"), StandIn("decode", "d0"), StandIn("both", "b0")
    async with fleet(decode, both) as it:
        await until(lambda: len(it.loads()) == 2)
        assert not decode.peers
    async with fleet(decode, prefill, both) as it:
        await until(lambda: decode.peers)
        assert [(peer.address, peer.incarnation) for peer in decode.peers] == [
            (prefill.address, prefill.identity.incarnation)
        ]
        assert not both.peers
        assert not prefill.peers
        await until(lambda: len(it.loads()) == 3)
        await prefill.stop()
        await until(lambda: not decode.peers)


async def test_status_corrects_the_load() -> None:
    worker = StandIn("both", "b0", pages=50)
    async with fleet(worker) as it:
        await until(it.loads)
        load = it.loads()[0]
        load.charge(100, 10)
        worker.status(free_pages=7, waiting_tokens=33, running=2, waiting=3)
        await until(lambda: load.free_pages == 7)
        assert (load.waiting_tokens, load.sequences) == (33, 5)
        worker.draining = True
        worker.status(draining=True)
        await until(lambda: load.draining)
        assert not it.can_decode
        assert "draining" in it.unavailable().message


def hello(worker: StandIn) -> pb.WorkerHello:
    message = worker.hello()
    message.address = "x:1"
    return message


def step(name: SequenceKey, index: int = 0) -> pb.FromWorker:
    return pack_step(1, [SequenceOutput(name, index, [Token(9)], None, None)])


async def test_answers_reach_their_attempt_and_no_other() -> None:
    session, old, new = WorkerSession(hello(StandIn("both", "b0")), GATEWAY.incarnation), inbox(), inbox()
    submit(session, key(1, attempt=0), old)
    session.cancel(key(1, attempt=0))
    submit(session, key(1, attempt=1), new)
    session.receive(step(key(1, attempt=0)))
    session.receive(step(key(2)))
    session.receive(step(key(1, attempt=1), 3))
    failure = pb.Failure(request=1, attempt=1, code=pb.FAILURE_CODE_INTERNAL, message="x")
    session.receive(pb.FromWorker(failure=failure))
    session.receive(pb.FromWorker())
    session.forget(key(1, attempt=1))
    session.receive(step(key(1, attempt=1), 4))
    output, failed = await taken(new)
    assert isinstance(output, Output)
    assert output.output.first_index == 3
    assert isinstance(failed, Failed)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await taken(old)
    sent = [(await session.outbox.take() or (None, 0))[0] for _ in range(3)]
    assert [message.WhichOneof("kind") for message in sent if message is not None] == ["submit", "cancel", "submit"]


async def test_a_cancel_of_what_is_unknown_sends_nothing() -> None:
    session = WorkerSession(hello(StandIn("both", "b0")), GATEWAY.incarnation)
    session.cancel(key(1))
    assert session.outbox.empty


async def test_messages_that_make_no_sense_are_refused() -> None:
    session = WorkerSession(hello(StandIn("both", "b0")), GATEWAY.incarnation)
    with pytest.raises(Mismatch):
        session.receive(pb.FromWorker(hello=pb.WorkerHello()))
    with pytest.raises(Mismatch):
        session.receive(pb.FromWorker(step=pb.Step(requests=[1])))
    with pytest.raises(Mismatch, match="pages"):
        WorkerSession(pb.WorkerHello(role=pb.ROLE_BOTH, identity=GATEWAY.message()), 1)


async def test_a_worker_that_does_not_read_loses_its_session_not_our_memory() -> None:
    session, box = WorkerSession(hello(StandIn("both", "b0")), GATEWAY.incarnation), inbox()
    submit(session, key(1), box)
    message = make_submit(key(2), Work.ALL, [7] * 1_000_000, SamplingParams())

    def flood() -> None:
        for request in range(2, 200):
            session.submit(key(request), message, box)

    with pytest.raises(Unavailable, match="does not read"):
        flood()
    assert session.waiting == 0
    assert isinstance((await taken(box))[0], Gone)


def test_identity_is_a_plain_value() -> None:
    assert isinstance(GATEWAY, ProcessIdentity)
