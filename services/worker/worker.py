"""A worker process: one engine, its role's hand-over, sessions with gateways; from start to drained end."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import grpc.aio

from ...errors import ConfigError, TwostrokeError, Unavailable
from ...kvtransfer.process import host_id
from ...v1 import worker_pb2 as pb
from ...v1 import worker_pb2_grpc
from ..garbage import settle
from ..grpc_setup import Health, add_health_and_reflection, bind
from ..identity import ProcessIdentity, draw_identity
from ..security.cluster import warn_of_open_worker, worker_credentials, worker_server
from ..settings import WorkerSettings, split_address
from ..stopping import Stopping, unless
from .cache_publisher import CachePublisher
from .driver import Driver
from .sessions import Sessions
from .stall import STALL_BEATS, stalled
from .worker_engine import WorkerEngine, warm_up
from .worker_role import Role, make_role
from .worker_servicer import WorkerServicer

log = logging.getLogger(__name__)

T = TypeVar("T")
SERVICE = pb.DESCRIPTOR.services_by_name["Worker"].full_name
GRACE_S = 1.0  # for calls that are still there at the end
ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}


async def serve(settings: WorkerSettings, *, bars: bool = False) -> str | None:
    """Runs a worker until SIGTERM or SIGINT: the first drains it, the second ends it. Returns the role to come back in,
    where a gateway asked for that. `bars`: show on stderr how far loading is.

    Listens at once, so that whoever asks learns that the model is still being loaded; serves once warmed up. Raises
    ConfigError where the settings, the model or this machine do not do, TwostrokeError when the engine failed: an
    engine in an unknown state serves nobody, so the process ends and its supervisor starts another.
    """
    stopping = Stopping()
    stopping.install()
    identity = draw_identity(settings.name or f"{settings.role}-{os.getpid()}", host_id())
    server = worker_server(settings)
    servicer = WorkerServicer()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    health = await add_health_and_reflection(server, [SERVICE])
    loaded = WorkerEngine(settings, identity.incarnation, bars=bars)
    try:
        address = _listen(server, settings)
        await server.start()
        log.info("%s %s (pid %d) listens on %s", settings.role, identity.name, identity.pid, address)
        if await unless(stopping.first, in_thread("load", loaded.load)) is not None:
            worker = Worker(settings, identity, loaded, advertised(settings, address), servicer, health)
            await worker.run(stopping)
            return None if stopping.first.is_set() else worker.next_role
        return None
    finally:
        await server.stop(GRACE_S)
        loaded.close()
        stopping.remove()


class Worker:
    """A worker whose engine is loaded."""

    def __init__(
        self,
        settings: WorkerSettings,
        identity: ProcessIdentity,
        loaded: WorkerEngine,
        address: str,
        servicer: WorkerServicer,
        health: Health,
    ) -> None:
        """`address`: where other workers reach this one."""
        self._settings = settings
        self._identity = identity
        self._loaded = loaded
        self._address = address
        self._servicer = servicer
        self._health = health
        self._role: Role = make_role(settings, identity, loaded)
        self._sessions = Sessions(
            settings.role,
            buffer_bytes=settings.session_buffer_bytes,
            silence_s=settings.silence_s,
            on_peers=self._role.on_peers,
        )
        self._driver = Driver(
            loaded.engine.core,
            self._role.handover,
            asyncio.get_running_loop(),
            self._sessions.on_result,
            on_released=self._sessions.on_released,
        )
        self._sessions.attach(self._driver)

    @property
    def next_role(self) -> str | None:
        """What it was told to become."""
        return self._sessions.next_role

    async def run(self, stopping: Stopping) -> None:
        """Serves until the first signal, drains until the second. TwostrokeError when the engine failed."""
        self._driver.start()
        try:
            engine = self._loaded.engine
            with engine.times.part("warm-up"):
                await self._driver.call(partial(warm_up, engine.core, engine.plan.page_size))
            log.info("started in %s", engine.times)
            settle()
            await self._serve_until_stopped(stopping)
        finally:
            await self._end()
        if self._driver.failure is not None:
            raise TwostrokeError(f"the engine failed: {self._driver.failure!r}") from self._driver.failure

    async def _serve_until_stopped(self, stopping: Stopping) -> None:
        self._servicer.open(self._hello(), self._sessions, self._role.links)
        publisher = CachePublisher(self._driver, self._loaded.engine.core.pool.prefix)
        works = (self._sessions.run(), publisher.run(self._sessions.all), self._abandon_if_hung())
        background = [asyncio.create_task(work) for work in works]
        try:
            await self._health.set_serving(True)
            log.info("ready: %s on %s", self._loaded.form.model, self._address)
            await unless(stopping.first, unless(self._sessions.role_wanted, self._driver.ended.wait()))
            await self._health.set_serving(False)
            if not self._driver.ended.is_set():
                await unless(stopping.second, unless(self._driver.ended, self._sessions.drain(self._settings.drain_s)))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _abandon_if_hung(self) -> None:
        """A hung engine serves nobody, yet all else looks alive: the process ends, for its supervisor to start anew."""
        await stalled(lambda: self._driver.turns, beats=STALL_BEATS)
        self._driver.abandon(TwostrokeError(f"nothing has moved for {STALL_BEATS} s"))

    async def _end(self) -> None:
        failed = self._driver.ended.is_set()
        self._sessions.end_all(Unavailable("the worker's engine failed" if failed else "the worker has stopped"))
        with contextlib.suppress(TwostrokeError, TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._driver.call(lambda: None)  # what was dropped is revoked; the links still carry that
        await self._driver.stop()
        await self._role.stop()
        self._role.close()

    def _hello(self) -> pb.WorkerHello:
        engine = self._loaded.engine
        return pb.WorkerHello(
            identity=self._identity.message(),
            role=ROLES[self._settings.role],
            format=self._loaded.form,
            address=self._address,
            pages=engine.plan.pages - 1,
            max_batch=self._settings.engine_options().max_batch,
            chunk_tokens=self._settings.engine_options().decode_prefill_budget,
            start_seconds=engine.times.to_dict(),
            memory_bytes=engine.memory.parts,
            max_tokens=min(engine.config.context_length, (engine.plan.pages - 1) * engine.plan.page_size),
        )


def _listen(server: grpc.aio.Server, settings: WorkerSettings) -> str:
    try:
        address = bind(server, settings.listen, worker_credentials(settings))
    except RuntimeError as error:
        raise ConfigError(f"listen: cannot listen on {settings.listen} (is it in use?)", field="listen") from error
    warn_of_open_worker(settings)
    return address


def advertised(settings: WorkerSettings, address: str) -> str:
    """Where other workers reach what listens on `address`: a wildcard stands for this machine's name."""
    if settings.advertise:
        host, port = split_address(settings.advertise)
        return settings.advertise if port else f"{host}:{split_address(address)[1]}"
    host, port = split_address(address)
    if host not in ("0.0.0.0", "[::]"):
        return address
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, port)
    except OSError:
        log.warning("this machine's name %r does not resolve: only local workers can reach this one", name)
        name = "127.0.0.1"
    return f"{name}:{port}"


async def in_thread(name: str, fn: Callable[[], T]) -> bool:
    """Runs `fn` in a thread that ends with the process: unlike an executor's, it does not hold up the end. True."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            fn()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    await done
    return True
