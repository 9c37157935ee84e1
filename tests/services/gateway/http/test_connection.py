"""A connection's bounds, by bare sockets: headers, time, pipelines, readers that do not read, too many of them."""

import asyncio
import gc
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import ConfigError
from twostroke.services.gateway.http import connection, door
from twostroke.services.gateway.http.connection import CUT, ConnectionLimits
from twostroke.services.gateway.http.door import HttpDoor, Listener
from twostroke.services.gateway.http.tls import listener_context
from twostroke.services.security import watched_file
from twostroke.services.security.tls import TlsFiles

from ...certificates import Authority, Pair
from ...cluster import until
from ...http_client import raw, request_bytes

App = Callable[[Any, Any, Any], Any]
GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def doorway(app: App, **limits: Any) -> AsyncIterator[tuple[HttpDoor, tuple[str, int]]]:
    it = HttpDoor(app, Listener("127.0.0.1:0"), ConnectionLimits(**limits))
    address = await it.start()
    try:
        yield it, ("127.0.0.1", int(address.rpartition(":")[2]))
    finally:
        await it.stop()
    assert it.connections == 0


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Reads all, says how much."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Up to the end, however the connection ended."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_in(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    return error


async def test_requests_one_after_the_other() -> None:
    async with doorway(hello) as (it, place):
        reader, writer = await raw(place)
        for body in ("a", "b" * 200_000, "c"):
            writer.write(request_bytes("/x", body))
            answer = await reader.readuntil(b"\r\n\r\n")
            assert status_of(answer) == 200
            size = await reader.readexactly(len(str(len(body) + 2)))
            assert int(size) == len(body) + 2
        assert it.connections == 1
        writer.close()
        await until(lambda: it.connections == 0)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /x HTTP/1.1\r\n" + b"a: b\r\n" * 2000,
        b"GET /x HTTP/1.1\r\na: " + b"b" * 20_000,
        b"GET /" + b"x" * 20_000,
        b"GET /x HTTP/1.1\r\n" + b"a" * 20_000,
        b"GET /x HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
        b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 2000,
    ],
)
async def test_headers_are_bounded(head: bytes) -> None:
    async with doorway(hello, header_bytes=8192) as (it, place):
        reader, writer = await raw(place)
        writer.write(head)
        answer = await reader.read()
        assert (status_of(answer), error_in(answer)["code"]) == (431, "headers_too_large")
        assert b"connection: close" in answer
        writer.close()
        await until(lambda: it.connections == 0)


async def test_headers_within_the_bound_may_come_in_pieces() -> None:
    async with doorway(hello, header_bytes=1024) as (_, place):
        reader, writer = await raw(place)
        for _ in range(2):  # each request has the bound for itself
            writer.write(b"GET /x HTTP/1.1\r\n")
            for _ in range(9):
                writer.write(b"a: " + b"b" * 95 + b"\r\n")
                await asyncio.sleep(0.002)
            writer.write(b"\r\n")
            assert status_of(await reader.readuntil(b"\r\n\r\n0")) == 200
        writer.close()


async def test_headers_that_come_byte_by_byte_are_bounded() -> None:
    async with doorway(hello, header_bytes=1024) as (_, place):
        reader, writer = await raw(place)
        writer.write(b"GET /x HTTP/1.1\r\na: ")
        answer = asyncio.create_task(reader.read())
        for _ in range(30):
            if answer.done():
                break
            writer.write(b"x" * 50)
            await asyncio.sleep(0.002)
        assert status_of(await answer) == 431
        writer.close()


@pytest.mark.parametrize(
    "request_", [b"GET /x HTTP/1.1\r\nhost: x\r\n", request_bytes("/x", "abc")[:-1], b"P"], ids=["head", "body", "line"]
)
async def test_a_request_that_does_not_end(request_: bytes) -> None:
    async with doorway(hello, receive_s=0.2) as (it, place):
        reader, writer = await raw(place)
        writer.write(request_)
        answer = await reader.read()
        assert (status_of(answer), error_in(answer)["code"]) == (408, "request_timeout")
        await until(lambda: it.connections == 0)
        writer.close()


async def test_a_connection_that_says_nothing() -> None:
    async with doorway(hello, receive_s=0.1) as (it, place):
        reader, writer = await raw(place)
        assert await reader.read() == b""
        writer.write(GET)  # too late
        await until(lambda: it.connections == 0)
        writer.close()
        reader, writer = await raw(place)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n0")
        writer.write(b"\r\n")  # between two requests this means nothing
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00", b"hello\r\n\r\n", b"GET /x HTTP/9.9\r\n\r\n", b"GET  \r\n\r\n"]
)
async def test_what_is_no_http(junk: bytes) -> None:
    async with doorway(hello) as (_, place):
        reader, writer = await raw(place)
        writer.write(junk)
        answer = await reader.read()
        assert (status_of(answer), error_in(answer)["code"]) == (400, "bad_request")
        writer.close()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"other"])
@pytest.mark.parametrize("framing", [b"content-length: %d" % len(GET), b"transfer-encoding: chunked"])
async def test_a_body_behind_a_wish_to_upgrade_is_no_request(protocol: bytes, framing: bytes) -> None:
    """Its bytes would be answered as a request of their own, to whoever comes next over a proxy's connection."""
    seen: list[str] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["method"])
        await hello(scope, receive, send)

    async with doorway(note) as (_, place):
        reader, writer = await raw(place)
        head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: %b\r\n%b\r\n\r\n"
        writer.write(head % (protocol, framing))
        answer = await reader.read()
        assert (status_of(answer), error_in(answer)["param"]) == (400, "upgrade")
        writer.write(GET)
        assert await rest_of(reader) == b""
        assert not seen
        writer.close()


async def test_a_wish_to_upgrade_without_a_body_is_ignored() -> None:
    asked = GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n"
    async with doorway(hello) as (_, place):
        reader, writer = await raw(place)
        for request_ in (asked, GET):
            writer.write(request_)
            assert status_of(await reader.readuntil(b"\r\n\r\n0")) == 200
        writer.close()


async def test_a_pipeline_ends_the_connection_and_what_runs() -> None:
    gone = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with doorway(wait) as (it, place):
        reader, writer = await raw(place)
        writer.write(GET)
        await reader.readuntil(b"x\r\n")
        writer.write(GET)
        assert await rest_of(reader) == b""
        await gone.wait()
        await until(lambda: it.connections == 0)
        writer.close()


async def test_too_many_connections() -> None:
    async with doorway(hello, connections=2) as (it, place):
        kept = [await raw(place) for _ in range(2)]
        await until(lambda: it.connections == 2)
        reader, writer = await raw(place)
        assert await rest_of(reader) == b""
        writer.close()
        kept[0][1].write(GET)
        assert status_of(await kept[0][0].readuntil(b"\r\n\r\n")) == 200
        for _, writer in kept:
            writer.close()


def unread(place: tuple[str, int]) -> socket.socket:
    """A client with a small window that reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(place)
    client.send(GET)
    return client


async def test_a_reader_that_does_not_read_is_bounded_in_bytes_and_time() -> None:
    written = 0
    ended = asyncio.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watch = asyncio.create_task(receive_all(receive))
        while not watch.done():
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            written += 1000
            await asyncio.sleep(0)
        ended.set()

    async def receive_all(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with doorway(flood, write_s=0.3) as (it, place):
        client = unread(place)
        await ended.wait()
        assert written < 1 << 20
        await until(lambda: it.connections == 0)
        client.close()


async def test_a_cut_response_ends_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        scope["extensions"][CUT](b"last words")
        scope["extensions"][CUT](b"no more")

    async with doorway(cut) as (it, place):
        reader, writer = await raw(place)
        writer.write(GET)
        answer = await reader.read()
        assert answer.endswith(b"\r\n3\r\nabc\r\na\r\nlast words\r\n0\r\n\r\n")
        writer.close()
        await until(lambda: it.connections == 0)


async def test_a_cut_does_not_wait_for_a_reader_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (8 << 20), "more_body": True})
        scope["extensions"][CUT](b"last words")

    async with doorway(cut) as (it, place):
        client = unread(place)
        await until(lambda: it.connections == 1)
        await until(lambda: it.connections == 0)
        client.close()


async def test_stopping_lets_out_what_is_written_and_cuts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LAST_WORDS_S", 0.2)
    inside = asyncio.Event()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        inside.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with doorway(never) as (it, place):
        reader, writer = await raw(place)
        writer.write(GET)
        await inside.wait()
        await it.stop()
        assert await rest_of(reader) == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await raw(place)


async def test_an_address_that_cannot_be_had() -> None:
    async with doorway(hello) as (_, place):
        for address in (f"127.0.0.1:{place[1]}", "192.0.2.1:80", "no.such.host.invalid:80"):
            with pytest.raises(ConfigError, match="http_listen: cannot listen on") as caught:
                await HttpDoor(hello, Listener(address), ConnectionLimits()).start()
            assert caught.value.field == "http_listen"
    gc.collect()  # no socket is left to be warned of


@pytest.mark.parametrize("address", ["localhost:0", "[::1]:0", ":0", "0.0.0.0:0"])
async def test_addresses_of_all_kinds(address: str) -> None:
    it = HttpDoor(hello, Listener(address), ConnectionLimits())
    try:
        told = await it.start()
    except ConfigError:
        pytest.skip("no IPv6 here")
    host = "::1" if "::1" in address else "127.0.0.1"
    reader, writer = await raw((host, int(told.rpartition(":")[2])))
    writer.write(GET)
    assert status_of(await reader.readuntil(b"\r\n\r\n")) == 200
    writer.close()
    await it.stop()


async def test_a_handshake_that_does_not_end(tmp_path: Path) -> None:
    """Nothing, a part of a hello, and what is no TLS; whoever does it right is served meanwhile."""
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    context = listener_context(TlsFiles(pair.cert, pair.key, None))
    it = HttpDoor(hello, Listener("127.0.0.1:0", context), ConnectionLimits(), handshake_s=0.3)
    place = ("127.0.0.1", int((await it.start()).rpartition(":")[2]))
    try:
        silent = [await raw(place) for _ in range(30)]
        for (_, writer), part in zip(silent, (b"", b"\x16\x03\x01\x02\x00\x01", GET) * 10, strict=True):
            writer.write(part)
        trusted = ssl.create_default_context(cafile=str(authority.path))
        reader, writer = await asyncio.open_connection(*place, ssl=trusted)
        writer.write(GET)
        assert status_of(await reader.readuntil(b"\r\n\r\n0")) == 200
        for each, _ in silent:
            await asyncio.wait_for(rest_of(each), 10)
        writer.write(GET)
        assert status_of(await reader.readuntil(b"\r\n\r\n0")) == 200
        for _, one in (*silent, (reader, writer)):
            one.close()
    finally:
        await it.stop()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_versions_of_tls(tmp_path: Path, version: ssl.TLSVersion) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    it = HttpDoor(
        hello, Listener("127.0.0.1:0", listener_context(TlsFiles(pair.cert, pair.key, None))), ConnectionLimits()
    )
    place = ("127.0.0.1", int((await it.start()).rpartition(":")[2]))
    context = ssl.create_default_context(cafile=str(authority.path))
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    try:
        if version is ssl.TLSVersion.TLSv1_1:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(*place, ssl=context)
        else:
            _, writer = await asyncio.open_connection(*place, ssl=context)
            writer.close()
    finally:
        await it.stop()


async def test_certificates_of_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has none, or not a good one, gets no answer; half a replacement of ours changes nothing."""
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    pair = ours.issue("127.0.0.1")
    context = listener_context(TlsFiles(pair.cert, pair.key, ours.path))
    it = HttpDoor(hello, Listener("127.0.0.1:0", context), ConnectionLimits())
    place = ("127.0.0.1", int((await it.start()).rpartition(":")[2]))

    async def answer(client: Pair | None) -> int:
        trusted = ssl.create_default_context(cafile=str(ours.path))
        if client is not None:
            trusted.load_cert_chain(client.cert, client.key)
        try:
            reader, writer = await asyncio.open_connection(*place, ssl=trusted)
        except (ssl.SSLError, ConnectionError):
            return 0
        try:
            writer.write(GET)  # TLS 1.3: the client's certificate is looked at after its handshake
            return status_of(await reader.readuntil(b"\r\n\r\n0"))
        except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
            return 0
        finally:
            writer.close()

    friend = ours.issue("me")
    bad = (None, others.issue("me"), ours.issue("me", days=-1), ours.issue("me", days=2, starts=1))
    try:
        assert [await answer(client) for client in (friend, *bad)] == [200, 0, 0, 0, 0]
        whole = pair.cert.read_bytes()
        pair.cert.write_bytes(whole[: len(whole) // 2])
        assert [await answer(client) for client in (friend, None)] == [200, 0]
        pair.replace_by(others.issue("127.0.0.1"))  # of which the clients know nothing
        assert await answer(friend) == 0
        pair.replace_by(ours.issue("127.0.0.1"))
        assert await answer(friend) == 200
        await until(lambda: it.connections == 0)
    finally:
        await it.stop()
