"""TLS on real connections: who is let in, who is believed, and what happens when files are replaced."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from twostroke.errors import ConfigError
from twostroke.services.grpc_setup import bind, connection_fault, create_server, open_channel
from twostroke.services.interceptor import ErrorInterceptor
from twostroke.services.security import watched_file
from twostroke.services.security.peer_names import PeerNames
from twostroke.services.security.tls import Dialer, TlsFiles, server_credentials

from ..certificates import Authority, Pair

CALL_S = 5.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def others(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "others")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the files counts."""
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)


def files(pair: Pair | None, ca: Path | None) -> TlsFiles:
    return TlsFiles(pair.cert if pair else None, pair.key if pair else None, ca)


async def echo_unary(request: bytes, _: Any) -> bytes:
    return request


async def echo_stream(requests: Any, context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def echo_generator(request: bytes, _: Any) -> AsyncIterator[bytes]:
    yield request
    yield request


HANDLERS = {
    "unary": grpc.unary_unary_rpc_method_handler(echo_unary),
    "stream": grpc.stream_stream_rpc_method_handler(echo_stream),
    "generator": grpc.unary_stream_rpc_method_handler(echo_generator),
}


@asynccontextmanager
async def listening(server_files: TlsFiles, *, mutual: bool = False, names: tuple[str, ...] = ()) -> AsyncIterator[str]:
    server = create_server([ErrorInterceptor(), *([PeerNames(names)] if names else [])])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", HANDLERS),))
    address = bind(server, "localhost:0", server_credentials(server_files, require_client=mutual))
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def answer(channel: grpc.aio.Channel) -> str:
    """`ok`, or how a call ended."""
    async with channel:
        try:
            await channel.unary_unary("/test/unary")(b"x", timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "ok"


async def test_tls(authority: Authority, others: Authority) -> None:
    pair = authority.issue("localhost")
    async with listening(files(pair, None)) as address:
        assert await answer(Dialer(files(None, authority.path))(address)) == "ok"
        assert "CERTIFICATE_VERIFY_FAILED" in await answer(Dialer(files(None, others.path))(address))
        assert "CERTIFICATE_VERIFY_FAILED" in await answer(Dialer(files(None, None))(address))
        assert (await answer(open_channel(address))).startswith("UNAVAILABLE")  # plaintext


async def test_names(authority: Authority) -> None:
    pair = authority.issue("gateway.example", "127.0.0.1")
    async with listening(files(pair, None)) as address:
        port = address.rpartition(":")[2]
        assert await answer(Dialer(files(None, authority.path), name="gateway.example")(address)) == "ok"
        assert await answer(Dialer(files(None, authority.path))(f"127.0.0.1:{port}")) == "ok"
        assert "Hostname Verification" in await answer(Dialer(files(None, authority.path))(address))
        assert "Hostname" in await answer(Dialer(files(None, authority.path), name="other.example")(address))


async def test_an_expired_certificate_is_not_believed(authority: Authority) -> None:
    async with listening(files(authority.issue("localhost", days=-1), None)) as address:
        assert "expired" in await answer(Dialer(files(None, authority.path))(address))
    async with listening(files(authority.issue("localhost", days=2, starts=1), None)) as address:
        assert "not yet valid" in await answer(Dialer(files(None, authority.path))(address))


async def test_clients_must_show_a_certificate_of_ours(authority: Authority, others: Authority) -> None:
    server = files(authority.issue("localhost"), authority.path)
    async with listening(server, mutual=True) as address:
        assert await answer(Dialer(files(authority.issue("me"), authority.path))(address)) == "ok"
        later = authority.issue("me", days=2, starts=1)
        for client in (None, others.issue("me"), authority.issue("me", days=-1), later):
            assert (await answer(Dialer(files(client, authority.path))(address))).startswith("UNAVAILABLE")
    async with listening(server, mutual=False) as address:
        assert await answer(Dialer(files(None, authority.path))(address)) == "ok"


async def test_expected_names(authority: Authority) -> None:
    server = files(authority.issue("localhost"), authority.path)
    async with listening(server, mutual=True, names=("gateway", "decode")) as address:
        for name, told in (("gateway", "ok"), ("decode", "ok"), ("other", "PERMISSION_DENIED"), ("gatewa", "PERM")):
            assert (await answer(Dialer(files(authority.issue(name), authority.path))(address))).startswith(told)
        two = authority.issue("other", "decode")
        async with Dialer(files(two, authority.path))(address) as channel:
            call = channel.unary_stream("/test/generator")(b"x", timeout=CALL_S)
            assert [piece async for piece in call] == [b"x", b"x"]
        async with Dialer(files(authority.issue("x"), authority.path))(address) as channel:
            for kind in ("generator", "stream"):
                multi: Any = channel.unary_stream if kind == "generator" else channel.stream_stream
                request: Any = b"x" if kind == "generator" else iter([b"x"])
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    [piece async for piece in multi(f"/test/{kind}")(request, timeout=CALL_S)]
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "decode" not in (refused.value.details() or "")
            missing = channel.unary_unary("/test/none")
            with pytest.raises(grpc.aio.AioRpcError):
                await missing(b"", timeout=CALL_S)


async def until_answer(channel: Callable[[], grpc.aio.Channel], wanted: str) -> None:
    async with asyncio.timeout(20):
        while wanted not in await answer(channel()):
            await asyncio.sleep(0.05)


async def test_replaced_files_count_for_new_connections_while_streams_run(authority: Authority) -> None:
    pair, client = authority.issue("first.example"), authority.issue("me")
    first = Dialer(files(client, authority.path), name="first.example")
    second = Dialer(files(client, authority.path), name="second.example")
    async with listening(files(pair, authority.path), mutual=True) as address, first(address) as channel:
        stream = channel.stream_stream("/test/stream")()
        await stream.write(b"1")
        assert await stream.read() == b"1"
        pair.replace_by(authority.issue("second.example"))
        await until_answer(lambda: second(address), "ok")
        assert "Hostname" in await answer(first(address))
        await stream.write(b"2")
        assert await stream.read() == b"2"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


@pytest.mark.usefixtures("at_once")
async def test_a_ca_that_is_withdrawn_lets_nobody_in_any_more(
    authority: Authority, others: Authority, tmp_path: Path
) -> None:
    ca = tmp_path / "clients.pem"
    ca.write_bytes(authority.path.read_bytes() + others.path.read_bytes())
    server = files(authority.issue("localhost"), ca)
    mine, theirs = (Dialer(files(a.issue("me"), authority.path)) for a in (authority, others))
    async with listening(server, mutual=True) as address:
        assert [await answer(mine(address)), await answer(theirs(address))] == ["ok", "ok"]
        ca.write_bytes(authority.path.read_bytes())
        assert await answer(mine(address)) == "ok"
        assert (await answer(theirs(address))).startswith("UNAVAILABLE")


@pytest.mark.usefixtures("at_once")
async def test_half_a_renewal_changes_nothing(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    pair = authority.issue("localhost")
    old = Dialer(files(None, authority.path))
    async with listening(files(pair, None)) as address:
        renewed = authority.issue("localhost")
        pair.cert.write_bytes(renewed.cert.read_bytes())  # its key is still the old one
        assert await answer(old(address)) == "ok"
        assert "stays in force" in caplog.text
        pair.key.write_bytes(b"")
        assert await answer(old(address)) == "ok"
        assert "KEY-----" not in caplog.text
        pair.key.write_bytes(renewed.key.read_bytes())
        assert await answer(old(address)) == "ok"


@pytest.mark.usefixtures("at_once")
async def test_a_channel_takes_the_newest_files(authority: Authority, others: Authority) -> None:
    server = files(authority.issue("localhost"), authority.path)
    client = others.issue("me")
    dialer = Dialer(files(client, authority.path))
    async with listening(server, mutual=True) as address:
        assert (await answer(dialer(address))).startswith("UNAVAILABLE")
        client.replace_by(authority.issue("me"))
        assert await answer(dialer(address)) == "ok"


def test_files_that_will_not_do(authority: Authority, others: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("a"), others.issue("b")
    none, nothing = tmp_path / "none", tmp_path / "nothing"
    nothing.write_bytes(b"")
    cases: list[tuple[TlsFiles, bool, str]] = [
        (TlsFiles(pair.cert, None, None), False, "tls_key: got nothing.*tls_cert is given"),
        (TlsFiles(None, pair.key, None), False, "tls_cert: got nothing.*tls_key is given"),
        (TlsFiles(None, None, authority.path), False, "tls_cert: got nothing.*tls_client_ca"),
        (TlsFiles(pair.cert, pair.key, None), True, "tls_client_ca: got nothing"),
        (TlsFiles(none, pair.key, None), False, "tls_cert: cannot read"),
        (TlsFiles(pair.cert, none, None), False, "tls_key: cannot read"),
        (TlsFiles(pair.cert, pair.key, none), True, "tls_client_ca: cannot read"),
        (TlsFiles(pair.cert, other.key, None), False, "tls_cert: .* no certificate with its key"),
        (TlsFiles(pair.key, pair.cert, None), False, "tls_cert: .* no certificate with its key"),
        (TlsFiles(nothing, nothing, None), False, "tls_cert: .* no certificate with its key"),
        (TlsFiles(pair.cert, pair.key, nothing), True, "tls_client_ca: .* holds no certificates"),
        (TlsFiles(pair.cert, pair.key, pair.key), True, "tls_client_ca: .* holds no certificates"),
    ]
    for case, mutual, told in cases:
        with pytest.raises(ConfigError, match=told) as refused:
            server_credentials(case, require_client=mutual)
        assert "PRIVATE" not in refused.value.message
    assert server_credentials(TlsFiles(None, None, None), require_client=False) is None
    with pytest.raises(ConfigError, match="tls_client_ca"):
        Dialer(TlsFiles(None, None, nothing))


def test_an_encrypted_key_is_refused_and_no_password_asked_for(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization as s

    pair = authority.issue("a")
    key = s.load_pem_private_key(pair.key.read_bytes(), None)
    sealed = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
    pair.key.write_bytes(sealed)
    with pytest.raises(ConfigError, match="no certificate with its key"):
        server_credentials(files(pair, None), require_client=False)


async def test_why_a_connection_failed_is_told_in_words(authority: Authority, others: Authority) -> None:
    async def told(channel: grpc.aio.Channel) -> str:
        return connection_fault((await answer(channel)).partition(": ")[2])

    server = files(authority.issue("localhost"), authority.path)
    mine = files(authority.issue("me"), authority.path)
    async with listening(server, mutual=True) as address:
        assert await told(Dialer(files(None, others.path))(address)) == (
            "its certificate is not trusted: unable to get local issuer certificate"
        )
        assert await told(Dialer(mine, name="other")(address)) == "its certificate is for another name"
        assert "it may want TLS, or another certificate" in await told(Dialer(files(None, authority.path))(address))
        assert "it may want TLS, or another certificate" in await told(open_channel(address))
    async with listening(files(None, None)) as address:
        assert await told(Dialer(mine)(address)) == "it does not speak TLS"
    assert "refused" in await told(open_channel(address))
