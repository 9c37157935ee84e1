"""A whole stack with certificates everywhere and keys at the door: what works, who is kept out, what tenants share."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from twostroke.errors import PermissionDenied, Unauthenticated
from twostroke.services.client.access import Access, Secret
from twostroke.services.client.client import Client
from twostroke.services.client.cluster_client import ClusterClient
from twostroke.services.grpc_setup import open_channel
from twostroke.services.security.api_keys import new_key
from twostroke.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from twostroke.v1 import inference_pb2_grpc as rpc

from ..services.certificates import Authority, Pair
from .harness import Answer, Launch, Stack, token_request

PROMPT = [5, 6, 7, 8, 9] * 40
MODEL = ("--dtype", "float32", "--kv-memory", "8MiB", "--threads", "1")


async def answer(channel: grpc.aio.Channel, access: Access, prompt: list[int] = PROMPT, max_tokens: int = 20) -> Answer:
    whole = Answer()
    request = token_request(prompt, max_tokens=max_tokens)
    async for message in rpc.InferenceStub(channel).Generate(request, timeout=60, metadata=access.metadata):
        whole.take(message)
    return whole


async def session_ends(channel: grpc.aio.Channel) -> str:
    """How a session that a worker does not take ends."""
    async with channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session(timeout=5)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(worker_pb2.ToWorker(hello=worker_pb2.GatewayHello()))
            await call.read()
        return str((await call.code()).name)


async def command(*words: str, key: str = "") -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "twostroke.services.cli", *words),
        env={**os.environ, "TWOSTROKE_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


class Secured:
    """A stack of one prefill and one decode worker, mutual TLS on every connection, keys at the door."""

    def __init__(self, stack: Stack, ours: Authority, door: Pair, inside: Pair, keys: dict[str, str]) -> None:
        self.stack, self.ours, self.door, self.inside, self.keys = stack, ours, door, inside, keys
        self.mine = ours.issue("me")
        self.admin = next(event for event in stack.events if event["event"] == "serving")["admin"]

    def access(self, tenant: str) -> Access:
        key = Secret(self.keys[tenant])
        return Access(ca=self.ours.path, cert=self.mine.cert, cert_key=self.mine.key, key=key)

    async def workers(self) -> list[cluster_pb2.WorkerInfo]:
        async with ClusterClient(self.admin, access=Access(key=Secret(self.keys["ops"]))) as admin:
            return await admin.workers()

    async def until_ready(self) -> None:
        async with asyncio.timeout(30):
            while any(worker.state != cluster_pb2.WORKER_STATE_READY for worker in await self.workers()):
                await asyncio.sleep(0.1)

    async def idle(self) -> None:
        """Every worker's pages are free or cached, and nothing runs; no integrity error in the log."""
        async with asyncio.timeout(20):
            while any(w.free_pages != w.pages or w.running or w.waiting for w in await self.workers()):
                await asyncio.sleep(0.1)
        text = self.stack.log.read_text()
        assert "integrity" not in text.lower(), text
        assert "Traceback" not in text, text
        assert not any(key in text for key in self.keys.values())


@pytest.fixture
async def secured(tiny_dir: Path, tmp_path: Path, launch: Launch) -> AsyncIterator[Secured]:
    ours = Authority(tmp_path, "ours")
    inside, door = ours.issue("inside"), ours.issue("localhost", "127.0.0.1")
    made = {name: new_key(name, admin=name == "ops") for name in ("acme", "umbrella", "ops")}
    (tmp_path / "keys").write_text("".join(kept.line() + "\n" for _, kept in made.values()))
    flags = [
        *("--model", str(tiny_dir), *MODEL, "--api-keys", str(tmp_path / "keys")),
        *("--cluster-cert", str(inside.cert), "--cluster-key", str(inside.key), "--cluster-ca", str(ours.path)),
        *("--cluster-name", "inside", "--cluster-peers", "inside"),
        *("--tls-cert", str(door.cert), "--tls-key", str(door.key), "--tls-client-ca", str(ours.path)),
        *("--admin-listen", "127.0.0.1:0"),
    ]
    async with launch(*flags) as stack:
        it = Secured(stack, ours, door, inside, {name: key for name, (key, _) in made.items()})
        await it.until_ready()
        yield it


async def test_certificates_everywhere(secured: Secured) -> None:
    it, stack = secured, secured.stack
    acme, umbrella = it.access("acme"), it.access("umbrella")
    async with acme.channel(stack.address) as channel:
        first = await answer(channel, acme)
        assert first.finish.prefill_worker == "prefill-0"
        assert first.finish.decode_worker == "decode-0"  # so KV went over a link
        assert first.finish.usage.cached_tokens == 0
        # Tenants share nothing; a tenant finds its own.
        other = await answer(channel, umbrella)
        assert (other.token_ids, other.finish.usage.cached_tokens) == (first.token_ids, 0)
        again = await answer(channel, acme)
        assert again.token_ids == first.token_ids
        assert again.finish.usage.cached_tokens > 100
    await it.idle()


@pytest.mark.slow
async def test_who_is_kept_out(secured: Secured, tmp_path: Path) -> None:
    it, stack = secured, secured.stack
    theirs = Authority(tmp_path, "theirs")
    stranger, named = theirs.issue("inside"), it.ours.issue("other")
    for name in stack.workers():
        address = stack.current(name)["address"]
        inside = Access(ca=it.ours.path, name="inside")
        assert await session_ends(open_channel(address)) == "UNAVAILABLE"  # plaintext
        assert await session_ends(inside.channel(address)) == "UNAVAILABLE"  # no certificate
        for pair, told in ((stranger, "UNAVAILABLE"), (named, "PERMISSION_DENIED")):
            access = Access(ca=it.ours.path, cert=pair.cert, cert_key=pair.key, name="inside")
            assert await session_ends(access.channel(address)) == told
    async with Client(stack.address, access=Access(ca=it.ours.path, key=Secret(it.keys["acme"]))) as client:
        with pytest.raises(Exception, match="no gateway answers"):
            await client.model()
    keyless = Access(ca=it.ours.path, cert=it.mine.cert, cert_key=it.mine.key)
    async with Client(stack.address, access=keyless) as client:
        with pytest.raises(Unauthenticated):
            await client.model()
    async with ClusterClient(it.admin, access=Access(key=Secret(it.keys["acme"]))) as admin:
        with pytest.raises(PermissionDenied):
            await admin.workers()
    await it.idle()


@pytest.mark.slow
async def test_commands_and_renewed_certificates(secured: Secured) -> None:
    it, stack = secured, secured.stack
    way = ("--ca", str(it.ours.path), "--client-cert", str(it.mine.cert), "--client-key", str(it.mine.key))
    words = ("generate", "--address", stack.address, "--raw", "--max-tokens", "3", "hello")
    code, output = await command(*words, *way, key=it.keys["acme"])
    assert code == 0, output
    code, output = await command(*words, *way)
    assert (code, "no credentials" in output) == (1, True)
    code, output = await command("workers", "list", "--json", "--address", it.admin, key=it.keys["ops"])
    assert (code, "decode-0" in output) == (0, True)
    code, output = await command("health", stack.address, *way)
    assert (code, output) == (0, "serving\n")

    acme = it.access("acme")
    async with acme.channel(stack.address) as channel:
        running = asyncio.create_task(answer(channel, acme, PROMPT[:-1], max_tokens=400))
        it.door.replace_by(it.ours.issue("renewed"))
        it.inside.replace_by(it.ours.issue("inside"))
        renewed = Access(ca=it.ours.path, cert=it.mine.cert, cert_key=it.mine.key, name="renewed", key=acme.key)
        async with asyncio.timeout(20):
            while True:
                async with Client(stack.address, access=renewed) as client:
                    with contextlib.suppress(Exception):
                        await client.model()
                        break
                await asyncio.sleep(0.1)
        assert len((await running).token_ids) > 0
    pid = stack.signal("decode-0", 9)  # what comes after it shows, and is shown, new certificates
    await stack.event("ready", "decode-0", after_pid=pid)
    await it.until_ready()
    async with renewed.channel(stack.address) as channel:
        last = await answer(channel, renewed, [3, 4, 5] * 50)
        assert last.finish.prefill_worker == "prefill-0"
        assert last.finish.decode_worker == "decode-0"
    await it.idle()
