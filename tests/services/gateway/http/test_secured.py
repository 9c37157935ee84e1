"""Keys, tenants and certificates on the HTTP door."""

import asyncio
import ssl
from pathlib import Path

import httpx2
import openai
import pytest

from twostroke.services.gateway.gateway import Gateway, load_model
from twostroke.services.security.api_keys import new_key
from twostroke.services.security.limits import Limits
from twostroke.services.settings import GatewaySettings

from ...certificates import Authority
from ...cluster import until
from ...http_client import USER, Served, served
from ...stand_in_worker import Script, StandIn

PATH = "/v1/chat/completions"
BODY = {"messages": USER, "max_tokens": 3}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """By tenant, with the file's path under `path`."""
    path = tmp_path / "keys.jsonl"
    told = {"path": str(path)}
    for name, more in (("acme", {"limits": Limits(max_requests=2)}), ("umbrella", {}), ("ops", {"admin": True})):
        told[name], kept = new_key(name, **more)  # type: ignore[arg-type]
        with path.open("a") as file:
            file.write(kept.line() + "\n")
    return told


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_callers_need_a_key(tiny_llama_dir: Path, keys: dict[str, str]) -> None:
    async with served(tiny_llama_dir, StandIn("both", "b0"), api_keys=Path(keys["path"])) as it:
        paths = ["/v1/models", "/v1/models/llama", "/metrics", "/nothing", "/v1/completions"]
        for headers in ({}, bearer("wrong"), bearer(keys["acme"][:-1]), {"authorization": keys["acme"]}):
            for path in paths:
                response = await it.http.get(path, headers=headers)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
                assert response.json()["error"]["code"] == "invalid_api_key"
            assert (await it.http.post(PATH, content=b"never read", headers=headers)).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            await it.sdk.models.list()
        assert (await it.http.get("/health")).status_code == 200
        sdk = it.sdk.with_options(api_key=keys["umbrella"])
        assert [model.id async for model in sdk.models.list()] == ["llama"]
        assert (await sdk.chat.completions.create(model="llama", messages=USER)).choices[0].message.content  # type: ignore[arg-type]
        statuses = {
            name: (await it.http.get("/metrics", headers=bearer(keys[name]))).status_code for name in ("ops", "acme")
        }
        assert statuses == {"ops": 200, "acme": 403}


async def test_tenants_have_their_own_limits_and_caches(tiny_llama_dir: Path, keys: dict[str, str]) -> None:
    mute = Script(mute_after=0)
    async with served(tiny_llama_dir, StandIn("both", "b0", mute), api_keys=Path(keys["path"])) as it:
        first = await asking(it, keys["acme"], {**BODY, "n": 2})
        response = await it.http.post(PATH, json=BODY, headers=bearer(keys["acme"]))
        assert (response.status_code, int(response.headers["retry-after"])) in ((429, 1), (429, 2))
        assert "acme" in response.json()["error"]["message"]
        other = await asking(it, keys["umbrella"], BODY)
        salts = [bytes(submit.cache_salt) for submit in it.it.worker("b0").submits]
        assert len(set(salts)) == 2
        assert all(len(salt) == 32 for salt in salts)
        for task in (first, other):
            task.cancel()


async def asking(it: Served, key: str, body: dict[str, object]) -> "asyncio.Task[httpx2.Response]":
    """A request that is at the worker."""
    count = len(it.it.worker("b0").submits)
    task = asyncio.create_task(it.http.post(PATH, json=body, headers=bearer(key)))
    await until(lambda: len(it.it.worker("b0").submits) > count)
    return task


async def test_tls(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The gateway's certificate, the client's with the right name, and a renewal without a restart."""
    authority = Authority(tmp_path)
    door, friend, stranger = authority.issue("127.0.0.1"), authority.issue("friend"), authority.issue("stranger")
    worker = StandIn("both", "b0")
    await worker.start()
    settings = GatewaySettings(
        model=str(tiny_llama_dir), listen="127.0.0.1:0", workers=[worker.address], tls_cert=door.cert, tls_key=door.key,
        tls_client_ca=authority.path, tls_client_names=["friend"],
    )  # fmt: skip
    gateway = Gateway(settings, load_model(settings))
    await gateway.start()
    try:
        base = f"https://{gateway.http_address}"

        def client(pair: object = None) -> httpx2.AsyncClient:
            context = ssl.create_default_context(cafile=str(authority.path))
            if pair is not None:
                context.load_cert_chain(pair.cert, pair.key)  # type: ignore[attr-defined]
            return httpx2.AsyncClient(base_url=base, verify=context, trust_env=False)

        await until(lambda: gateway.fleet.can_decode)
        async with client(friend) as http:
            response = await http.post(PATH, json={**BODY, "stream": True})
            assert response.text.endswith("data: [DONE]\n\n")
            await until(lambda: gateway._health is not None and gateway._health.serving)
            assert (await http.get("/health")).status_code == 200
        async with client(stranger) as http:
            response = await http.post(PATH, json=BODY)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
        async with client() as http:
            with pytest.raises(httpx2.TransportError):
                await http.post(PATH, json=BODY)
        async with httpx2.AsyncClient(base_url=base.replace("https", "http"), trust_env=False) as http:
            with pytest.raises(httpx2.TransportError):
                await http.get("/health")
        before = await serial(gateway.http_address, authority, friend)
        door.replace_by(authority.issue("127.0.0.1"))
        await asyncio.sleep(1.1)  # files are looked at each second
        await until_serial_differs(before, gateway.http_address, authority, friend)
    finally:
        await gateway.stop()
        await worker.stop()


async def serial(address: str, authority: Authority, pair: object) -> object:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(authority.path))
    context.load_cert_chain(pair.cert, pair.key)  # type: ignore[attr-defined]
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    told = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return told


async def until_serial_differs(before: object, address: str, authority: Authority, pair: object) -> None:
    """New connections get the new certificate."""
    async with asyncio.timeout(10):
        while await serial(address, authority, pair) == before:
            await asyncio.sleep(0.05)
