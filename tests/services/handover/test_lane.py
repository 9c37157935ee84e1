"""The way of datagrams between two processes of a host: what goes by it, and that it can do no harm."""

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twostroke.kvtransfer.messages import Accepted, Complete, Drained, FirstToken, FromWriter, Progress
from twostroke.services.handover import lane as lane_module
from twostroke.services.handover.lane import Lane, LaneEnd, Lanes
from twostroke.services.handover.wire_link import from_writer
from twostroke.services.identity import ProcessIdentity
from twostroke.v1 import worker_pb2 as pb

from ..handover_rig import expected_tokens, random_prompt, running

WRITER, OTHER = 1 << 63, 9
PROGRESS = Progress(((3, 2, 1),))
COMPLETE = Complete(3, (FirstToken(0, 5, 0, ((5, -0.5),)),), bytes(range(8)) * 300, 1)


class End:
    """The decode worker's, and what came to it."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[tuple[int, FromWriter, str]] = queue.SimpleQueue()
        self.lanes: list[Lane] = []
        self.end = LaneEnd(lambda *what: self.came.put((*what, threading.current_thread().name)))

    def lane(self, writer: int = WRITER) -> Lane:
        self.lanes.append(Lane(writer, self.end.offer(writer)))
        return self.lanes[-1]

    def next(self) -> tuple[int, FromWriter, str]:
        return self.came.get(timeout=10)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.end.close()


@pytest.fixture
def end() -> Iterator[End]:
    made = End()
    yield made
    made.close()


def datagram(writer: int, secret: bytes, body: bytes) -> bytes:
    return writer.to_bytes(8, "big") + secret + body


def throw(end: End, *datagrams: bytes) -> None:
    """As any process of the host may."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for one in datagrams:
            sock.sendto(one, end.end.offer(WRITER).address)


def test_what_a_client_waits_for_goes_by_it_in_order(end: End) -> None:
    lane, other = end.lane(), end.lane(OTHER)
    assert lane.send(PROGRESS)
    assert lane.send(COMPLETE)
    assert [end.next() for _ in range(2)] == [(WRITER, PROGRESS, "kv-lane"), (WRITER, COMPLETE, "kv-lane")]
    assert other.send(COMPLETE)
    assert end.next()[:2] == (OTHER, COMPLETE)
    assert not lane.send(Drained(3))  # nobody waits for that


def test_strangers_and_nonsense_change_nothing(end: End, caplog: pytest.LogCaptureFixture) -> None:
    secret = end.end.offer(WRITER).secret
    good = from_writer(COMPLETE).SerializeToString()
    bad = pb.FromPrefill(complete=pb.Complete(ticket=0)).SerializeToString()
    throw(
        end,
        b"",
        b"\0" * 7,
        datagram(WRITER, secret[:-1], b""),
        datagram(WRITER, bytes(16), good),
        datagram(OTHER, secret, good),  # a secret of another writer's
        datagram(WRITER, secret, b"\xff" * 9),
        datagram(WRITER, secret, bad),
        datagram(WRITER, secret, pb.FromPrefill(heartbeat=pb.Heartbeat(sequence=1)).SerializeToString()),
        datagram(WRITER, secret, bytes(1 << 16)),  # longer than what is taken
    )
    lane = end.lane()
    assert lane.send(COMPLETE)
    assert end.next()[:2] == (WRITER, COMPLETE)
    assert end.came.empty()
    assert caplog.text.count("cannot be read") == 2


def test_secrets_differ_and_stay(end: End) -> None:
    assert end.end.offer(WRITER) == end.end.offer(WRITER)
    assert end.end.offer(WRITER).secret != end.end.offer(OTHER).secret
    assert len(end.end.offer(OTHER).secret) == 16


def test_what_is_too_long_goes_by_the_link(end: End) -> None:
    lane = end.lane()
    assert not lane.send(Complete(3, COMPLETE.first_tokens, bytes(1 << 16)))
    assert lane.send(Complete(3, COMPLETE.first_tokens, bytes((1 << 16) - 256)))
    assert end.next()[0] == WRITER


def test_a_full_queue_blocks_nobody(end: End) -> None:
    lane = end.lane()
    end.end.pause(time.monotonic() + 60)
    sent = 0
    while lane.send(PROGRESS) and sent < 10_000:
        sent += 1
    assert 0 < sent < 10_000
    assert end.came.qsize() <= 1  # one was taken before the thread paused
    end.end.resume()
    assert [end.next()[1] for _ in range(sent)] == [PROGRESS] * sent


def test_whoever_looks_himself_is_not_disturbed(end: End) -> None:
    lane = end.lane()
    end.end.look()  # nothing
    end.end.pause(time.monotonic() + 60)
    end.end.pause(time.monotonic() + 60)
    time.sleep(0.05)  # the thread pauses
    assert lane.send(COMPLETE)
    time.sleep(0.02)
    assert end.came.empty()
    end.end.look()
    assert end.next() == (WRITER, COMPLETE, "MainThread")
    end.end.resume()
    assert lane.send(PROGRESS)
    assert end.next() == (WRITER, PROGRESS, "kv-lane")


def test_a_pause_ends_by_itself_and_may_begin_again(end: End) -> None:
    lane = end.lane()
    for seconds in (0.3, 0.3, 60.0):
        begun = time.monotonic()
        end.end.pause(begun + seconds)
        time.sleep(0.05)  # the thread pauses
        assert lane.send(PROGRESS)
        if seconds < 1:
            assert end.next() == (WRITER, PROGRESS, "kv-lane")
            assert time.monotonic() - begun >= seconds
    end.end.look()
    assert end.next() == (WRITER, PROGRESS, "MainThread")


def test_who_was_heard_and_who_is_forgotten(end: End) -> None:
    lane = end.lane()
    assert not end.end.heard(WRITER)
    assert lane.send(PROGRESS)
    end.next()
    assert end.end.heard(WRITER)
    secret = end.end.offer(WRITER).secret
    end.end.forget(WRITER)
    end.end.forget(OTHER)
    assert not end.end.heard(WRITER)
    throw(end, datagram(WRITER, secret, from_writer(PROGRESS).SerializeToString()))
    assert end.lane(OTHER).send(PROGRESS)
    assert end.next()[0] == OTHER
    assert end.end.offer(WRITER).secret != secret


def test_closed_ends(end: End) -> None:
    lane = end.lane()
    end.end.pause(time.monotonic() + 60)
    end.end.close()
    end.end.look()
    assert not lane.send(PROGRESS)  # refused: nobody is there
    with pytest.raises(OSError, match="refused"):
        end.lane()
    lane.close()
    lane.close()
    assert not lane.send(PROGRESS)
    end.end.close()
    assert end.came.empty()


def test_what_cannot_be_taken_costs_nothing_else(end: End, caplog: pytest.LogCaptureFixture) -> None:
    lane, taken = end.lane(), end.end._received

    def fails(*_: Any) -> None:
        end.end._received = taken
        raise RuntimeError("no")

    end.end._received = fails
    assert lane.send(PROGRESS)
    assert lane.send(COMPLETE)
    assert end.next()[1] == COMPLETE
    assert "could not be taken" in caplog.text


class TestLanes:
    ME, HERE = ProcessIdentity(WRITER, "p", 1, "host"), ProcessIdentity(7, "d", 2, "host")
    THERE = ProcessIdentity(8, "far", 2, "another host")

    def test_what_cannot_go_is_left_for_the_links(self, end: End) -> None:
        lanes = Lanes(self.ME)
        lanes.open(self.HERE, end.end.offer(WRITER))
        left = lanes.send({7: [PROGRESS, Drained(1), COMPLETE], 8: [COMPLETE]})
        assert left == {7: [Drained(1)], 8: [COMPLETE]}
        assert [end.next()[1] for _ in range(2)] == [PROGRESS, COMPLETE]
        assert lanes.send({7: [COMPLETE]}) == {}
        lanes.close(7)
        assert lanes.send({7: [COMPLETE]}) == {7: [COMPLETE]}

    def test_none_is_opened_to_another_host_or_without_an_offer_or_where_none_is(
        self, end: End, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        lanes = Lanes(self.ME)
        lanes.open(self.THERE, end.end.offer(WRITER))
        for address, secret in (
            (b"", b""),
            (b"\0other", bytes(16)),
            (b"/run/log", bytes(16)),
            (b"\0twostroke-none", b""),
        ):
            lanes.open(self.HERE, pb.Lane(address=address, secret=secret))
        assert caplog.text == ""
        lanes.open(self.HERE, pb.Lane(address=b"\0twostroke-" + bytes(200), secret=bytes(16)))
        lanes.open(self.HERE, pb.Lane(address=b"\0twostroke-none", secret=bytes(16)))
        assert "by its link" in caplog.text
        assert lanes.send({7: [COMPLETE], 8: [COMPLETE]}) == {7: [COMPLETE], 8: [COMPLETE]}

    def test_a_newer_link_brings_a_newer_lane(self, end: End) -> None:
        lanes = Lanes(self.ME)
        lanes.open(self.HERE, end.end.offer(WRITER))
        again = End()
        lanes.open(self.HERE, again.end.offer(WRITER))
        lanes.send({7: [COMPLETE]})
        assert again.next()[1] == COMPLETE
        assert end.came.empty()
        lanes.close_all()
        assert lanes.send({7: [COMPLETE]}) == {7: [COMPLETE]}
        again.close()


async def test_workers_of_one_host_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_link: list[Any] = []
    async with running(tmp_path) as rig:
        put = rig.p.links._put
        monkeypatch.setattr(rig.p.links, "_put", lambda batches: (by_link.extend(batches.values()), put(batches)))
        for length in (3, 30):
            prompt = random_prompt(length, length)
            assert await rig.generate(prompt, 4) == expected_tokens(prompt, 4)
        await rig.whole()
        assert rig.d.links.lane(rig.p.identity.incarnation) is rig.d.links._lane
        assert rig.d.links.lane(5) is None
    assert not any(isinstance(message, Progress | Complete) for messages in by_link for message in messages)


async def test_hand_overs_go_on_where_none_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError("no such sockets")

    monkeypatch.setattr("twostroke.services.handover.link_client.LaneEnd", none)
    async with running(tmp_path) as rig:
        assert await rig.generate([1, 2, 3, 4, 5], 4) == expected_tokens([1, 2, 3, 4, 5], 4)
        await rig.whole()


async def test_what_is_said_again_when_a_link_comes_again_can_be_answered(tmp_path: Path) -> None:
    """`Accepted` was lost with the link: the repeated `Complete` must not come before the link stands at both ends."""
    async with running(tmp_path) as rig:
        rig.p.handover.writer._pushes.repeat_s = 1000.0
        send, writer = rig.d.links.send, rig.p.identity.incarnation

        def loses(batches: Any) -> None:
            if any(isinstance(message, Accepted) for messages in batches.values() for message in messages):
                rig.d.links.send = send  # type: ignore[method-assign]
                rig.d.links._loop.call_soon_threadsafe(rig.d.links.drop, writer)
            else:
                send(batches)

        for _ in range(5):
            rig.d.links.send = loses  # type: ignore[method-assign]
            assert await rig.generate([1, 2, 3, 4, 5], 4) == expected_tokens([1, 2, 3, 4, 5], 4)
            async with asyncio.timeout(10):
                await rig.p.settled(lambda: not rig.p.handover.writer.open_tickets())
        await rig.whole()


async def test_what_is_lost_on_the_way_is_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module.LaneEnd, "_take", lambda *_: None)
    async with running(tmp_path) as rig:
        rig.p.handover.writer._pushes.repeat_s = 0.1
        request = asyncio.create_task(rig.generate([1, 2, 3, 4, 5], 4))
        await asyncio.sleep(0.3)
        assert not request.done()
        monkeypatch.undo()
        assert await request == expected_tokens([1, 2, 3, 4, 5], 4)
        await rig.whole()
