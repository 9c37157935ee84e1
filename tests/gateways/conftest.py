"""One stack for all proxies, and each proxy in front of it. Everything lives on one loop, that of the session."""

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from twostroke.services.supervisor.machine import free_ports

from ..e2e.harness import Stack, launched
from ..services.certificates import Authority, Pair
from ..tiny import make_tiny_llama
from .kinds import KINDS, Kind, program
from .proxy import Proxy, proxied

CONTEXT = 16_384
MOST = 300  # requests at once
ProxyOf = Callable[..., AbstractAsyncContextManager[Proxy]]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Of the proxies' certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def certificate(authority: Authority) -> Pair:
    """Of all proxies."""
    return authority.issue("127.0.0.1", "localhost", days=5)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """1P1D on a tiny random model whose answers may go on for minutes."""
    folder = tmp_path_factory.mktemp("stack")
    model = make_tiny_llama(folder / "llama", context=CONTEXT)
    grpc_port, http_port = free_ports(2)
    flags = ["--model", str(model), "--kv-memory", "512MiB", "--max-batch", str(MOST), "--max-queue", str(MOST)]
    flags += ["--listen", f"127.0.0.1:{grpc_port}", "--http-listen", f"127.0.0.1:{http_port}"]
    flags += ["--keep-alive-s", "1", "--threads", "1", "--max-attempts", "1"]
    async with launched(folder / "log", *flags) as stack:
        yield stack


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=KINDS, ids=lambda kind: kind.name)
async def proxy(
    request: pytest.FixtureRequest, stack: Stack, certificate: Pair, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Proxy]:
    """Each of them in turn."""
    kind = request.param
    needs(kind)
    async with proxied(kind, stack, tmp_path_factory.mktemp(kind.name), certificate) as proxy:
        yield proxy


def needs(kind: Kind) -> None:
    """Skips the test where the program is missing."""
    if program(kind) is None:
        pytest.skip(f"{kind.name} is missing: make gateways")


@pytest.fixture
def another(stack: Stack, certificate: Pair, tmp_path: Path) -> ProxyOf:
    """Starts one of a kind, for a test alone."""
    return functools.partial(_another, stack, certificate, tmp_path)


def _another(
    stack: Stack, certificate: Pair, folder: Path, kind: Kind, *, impatient: bool = False
) -> AbstractAsyncContextManager[Proxy]:
    needs(kind)
    return proxied(kind, stack, folder, certificate, impatient=impatient)
