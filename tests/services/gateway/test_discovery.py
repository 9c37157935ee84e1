"""Names that stand for workers: looked up, looked up again, kept when the resolver fails."""

import asyncio
import socket
from collections.abc import Sequence

import pytest

from twostroke.services.gateway.discovery import Name, is_literal, look_up
from twostroke.services.gateway.fleet import Fleet
from twostroke.services.identity import draw_identity
from twostroke.services.settings import GatewaySettings

from ..cluster import until
from ..stand_in_worker import Script, StandIn

GATEWAY = draw_identity("gateway-0", "test-host")


@pytest.mark.parametrize(
    ("place", "literal"),
    [("127.0.0.1:1", True), ("[::1]:1", True), (":1", True), ("localhost:1", False), ("dns:a.b:1", False)],
)
def test_what_needs_no_look_up(place: str, literal: bool) -> None:
    assert is_literal(place) is literal


@pytest.mark.parametrize("place", ["decode:50051", "dns:decode.pool:50051", "10.0.0.1:6001", "[fd00::1]:6001"])
def test_places_that_settings_take(place: str) -> None:
    assert GatewaySettings(workers=[place]).workers == [place]


@pytest.mark.parametrize("place", ["dns:decode", "dns:", "decode", "dns:a:b:1", "http://x:1"])
def test_places_that_settings_refuse(place: str) -> None:
    with pytest.raises(ValueError, match="workers"):
        GatewaySettings(workers=[place])


async def test_changes_are_told_and_failures_are_not() -> None:
    answers: list[list[str] | OSError] = [
        socket.gaierror("no such name"),
        ["10.0.0.2", "10.0.0.1", "10.0.0.2"],
        ["10.0.0.1", "10.0.0.2"],
        socket.gaierror("try again"),
        ["10.0.0.2", "fd00::1"],
        [],
    ]
    told: list[Sequence[str]] = []

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("pool.test", 7)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    name = Name("dns:pool.test:7", told.append, resolve=resolve)
    reasons = []
    while answers:
        await name.look_up()
        reasons.append(name.reason)
    assert told == [("10.0.0.1:7", "10.0.0.2:7"), ("10.0.0.2:7", "[fd00::1]:7"), ()]
    assert "no such name" in reasons[0]
    assert reasons[1:3] == ["", ""]
    assert "try again" in reasons[3]
    assert reasons[4] == ""
    assert reasons[5] == "has no addresses"


async def test_one_machine_s_ways_to_itself_are_one_worker() -> None:
    told: list[Sequence[str]] = []

    async def resolve(host: str, port: int) -> list[str]:
        return ["::1", "127.0.0.1"]

    await Name("localhost:9", told.append, resolve=resolve).look_up()
    assert told == [("localhost:9",)]


async def test_the_system_s_resolver() -> None:
    assert set(await look_up("localhost", 1)) <= {"127.0.0.1", "::1"}
    with pytest.raises(OSError, match=r"."):
        await look_up("nowhere.invalid", 1)


async def test_workers_join_and_leave_with_their_name() -> None:
    """Two loopback addresses stand for two machines. One that is no longer named is left when its session ends."""
    workers = [StandIn("both", f"b{i}", Script(mute_after=1)) for i in range(2)]
    port = (await workers[0].start("127.0.0.2:0")).rpartition(":")[2]
    await workers[1].start(f"127.0.0.3:{port}")
    named = ["127.0.0.2"]

    async def resolve(host: str, _: int) -> list[str]:
        return [*named, "192.0.2.1"][: len(named) + 1] if host == "pool" else named

    it = Fleet([f"dns:pool:{port}"], GATEWAY, "llama", silence_s=10, resolve=resolve, resolve_s=0.05)
    it.start()
    await until(lambda: len(it.loads()) == 1)
    assert {client.address for client in it.clients} == {f"127.0.0.2:{port}", f"192.0.2.1:{port}"}
    named.append("127.0.0.3")
    await until(lambda: len(it.loads()) == 2)
    del named[0]
    await asyncio.sleep(0.2)
    assert len(it.loads()) == 2  # it still runs what it has
    await workers[0].stop()
    await until(lambda: [load.name for load in it.loads()] == ["b1"])
    await until(lambda: f"127.0.0.2:{port}" not in {client.address for client in it.clients})
    named.append("127.0.0.2")
    await until(lambda: f"127.0.0.2:{port}" in {client.address for client in it.clients})
    workers[0].identity = draw_identity("b0", "test-host")
    await workers[0].start(f"127.0.0.2:{port}")
    await until(lambda: len(it.loads()) == 2)
    await it.stop()
    for worker in workers:
        await worker.stop()


async def test_a_name_that_is_not_known_is_why_nobody_serves() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror("Name or service not known")

    it = Fleet(["dns:pool:1"], GATEWAY, "llama", silence_s=10, resolve=resolve)
    it.start()
    await until(lambda: "dns:pool:1: cannot be resolved" in it.unavailable().message)
    await it.stop()
