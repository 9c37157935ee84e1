"""A gateway over stand-in workers, as clients of its HTTP API see it: httpx, the OpenAI SDK, a bare socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI

from .cluster import Cluster, cluster
from .stand_in_worker import StandIn

USER: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@dataclass
class Served:
    """A cluster and its clients."""

    it: Cluster
    http: httpx2.AsyncClient
    sdk: AsyncOpenAI

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.it.gateway.http_address.rpartition(":")
        return host, int(port)

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """Sends JSON."""
        return await self.http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def refused(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and error object of a request that must not succeed."""
        response = await self.post(path, body, **headers)
        assert response.status_code >= 400, response.text
        (error,) = response.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        return response.status_code, error

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Of a stream that ends well."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_in(response.text)


def events_in(text: str) -> list[dict[str, Any]]:
    """The data of events up to the end mark, which must be the last one."""
    *events, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


@asynccontextmanager
async def served(model_dir: Path, *workers: StandIn, **settings: Any) -> AsyncIterator[Served]:
    """Ends only when the gateway holds nothing of any request any more."""
    async with cluster(model_dir, *workers, **settings) as it:
        base = f"http://{it.gateway.http_address}"
        async with (
            httpx2.AsyncClient(base_url=base, timeout=30, trust_env=False) as http,
            AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=30) as sdk,
        ):
            yield Served(it, http, sdk)
            await it.idle()


async def raw(place: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection."""
    return await asyncio.open_connection(*place)


def request_bytes(path: str, body: Any, *more: str) -> bytes:
    """A whole POST."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join([*lines, *more, "", ""]).encode() + content
