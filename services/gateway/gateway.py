"""The gateway process: puts its parts together, serves until told to stop, drains."""

import asyncio
import functools
import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ...engine.detokenizer import Detokenizer
from ...engine.model_config import ModelConfig
from ...engine.model_files import TEXT_ONLY
from ...engine.models import resolve, served_name
from ...engine.tokenizer import Tokenizer
from ...errors import ConfigError, Unavailable
from ...kvtransfer.process import host_id
from ...v1 import cluster_pb2, cluster_pb2_grpc
from ..garbage import settle
from ..grpc_events import take_together
from ..grpc_setup import Health, add_health_and_reflection, bind
from ..identity import draw_identity
from ..open_files import allow_open_files
from ..security.cluster import cluster_dialer, is_local
from ..security.tls import TlsFiles
from ..settings import GatewaySettings
from .admission import RETRY_S, Admission
from .board import Board
from .cluster_service import ClusterServicer
from .constraint_checks import ConstraintChecks
from .doors import add_doors, door_names
from .engine_port import EnginePort
from .figures import Figures
from .fleet import Fleet
from .http.app import build_app, build_metrics_app
from .http.bodies import Bodies
from .http.connection import LINGER_S, ConnectionLimits
from .http.door import HttpDoor, Listener
from .http.tls import listener_context
from .ledger import Ledger, LocalLedger
from .lifecycle import Lifecycle
from .management import Management
from .processes.ledger import SharedLedger
from .processes.memory import NAMES, TENANTS, WRONG_KEYS, SharedMemory
from .processes.names import SharedNames
from .processes.share import Share
from .processes.siblings import Siblings
from .security import authenticator, door_credentials, door_server, shared_bounds, warn_of_open_doors
from .served_model import ServedModel, longest_token
from .tools.formats import choose_format
from .vllm_engine.door import engine_servicer
from .vllm_engine.servicer import VllmEngineServicer

CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
TOKENIZER_THREADS = 2
QUEUE_DEPTH = 4  # tokens that may wait or run, of those that fit into the decode workers' KV pools at once
MEET_S = 5.0
LAST_WORDS_S = 2.0  # for statuses to leave before the server stops

logger = logging.getLogger(__name__)


def load_model(settings: GatewaySettings) -> ServedModel:
    """Finds (perhaps downloads) the model and reads what a gateway needs of it. ConfigError where it cannot be used."""
    path = resolve(settings.model, cache_dir=settings.models_dir, parts=TEXT_ONLY)
    config = ModelConfig.from_dir(path)
    tokenizer = Tokenizer.from_dir(path)
    most = config.context_length - 1  # a prompt leaves room for a token, an output for a prompt of one
    return ServedModel(
        name=served_name(settings.model),
        context_length=config.context_length,
        max_input=min(settings.max_input or most, most),
        max_output=min(settings.max_output or most, most),
        vocabulary_size=config.vocab_size,
        eos_token_ids=tuple(sorted(config.eos_token_ids)),
        longest_token=longest_token(tokenizer),
        tokenizer=tokenizer,
        detokenizer=functools.partial(Detokenizer, tokenizer),
        threads=ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer"),
        special_token_ids=tuple(sorted(i for i in tokenizer.special_ids if i < config.vocab_size)),
        folder=path,
        tool_format=choose_format(settings.tool_parser, tokenizer.template),
    )


def _books(share: Share | None) -> tuple[Board, Ledger, Ledger | None, SharedNames | None]:
    """What is inside, what tenants have taken, and what is shared of wrong keys and of requests' names."""
    if share is None:
        return Board(), LocalLedger(), None, None
    memory, index = SharedMemory(share.descriptor, share.count), share.index
    tenants, wrong_keys, names = (SharedLedger(memory.tables[each], index) for each in (TENANTS, WRONG_KEYS, NAMES))
    return memory.board(index), tenants, wrong_keys, SharedNames(names)


class Gateway:
    """A gateway that runs on the current loop."""

    def __init__(self, settings: GatewaySettings, model: ServedModel, share: Share | None = None) -> None:
        """`share`: of what several processes have in common, where it is one of them."""
        self._settings = settings
        self._model = model
        self._share = share
        board, ledger, wrong_keys, names = _books(share)
        identity = draw_identity(settings.name or f"gateway-{os.getpid()}", host_id())
        self._changed = asyncio.Event()
        self.admission = Admission(settings.max_queue, ledger, board=board, max_tokens=self._max_queue_tokens)
        self.fleet = Fleet(
            settings.workers,
            identity,
            model.name,
            silence_s=settings.silence_s,
            on_change=self._changed.set,
            channel=cluster_dialer(settings),
        )
        self.constraints = ConstraintChecks(model.folder)
        self.authenticator = authenticator(settings, wrong_keys)
        counts = share.figures if share is not None else None
        self.figures = Figures(self.admission, self.fleet, self.authenticator.wrong, counts)
        self.siblings = Siblings(share, board, self.fleet, names)
        self.lifecycle = Lifecycle(
            model,
            self.fleet,
            self.admission,
            incarnation=identity.incarnation,
            stream_buffer_bytes=settings.stream_buffer_bytes,
            slow_reader_s=settings.slow_reader_s,
            max_attempts=settings.max_attempts,
            replay_wait_s=settings.replay_wait_s,
            routing=settings.routing,
            disaggregate=settings.disaggregate,
            local_prefill_tokens=settings.local_prefill_tokens,
            figures=self.figures,
            constraints=self.constraints,
        )
        self.bounds = shared_bounds(settings)
        self._server = door_server(settings, self.authenticator, self.bounds, (CLUSTER,), tls=True)
        told = (*door_names(settings), CLUSTER)
        self._management = Management(settings, self.bounds, self.authenticator, self.fleet, self.siblings, told)
        self.engine = EnginePort(settings, self.bounds, self.authenticator, self._engine_servicer)
        self.http: HttpDoor | None = None
        self.metrics: HttpDoor | None = None  # where figures have a port of their own
        self.http_address = ""  # host:port, where it listens
        self._health: Health | None = None
        self._health_task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serves; returns host:port. ConfigError where the address cannot be had."""
        settings = self._settings
        if self._share is not None:
            await self._meet_workers()
        add_doors(
            self._server,
            settings,
            self.lifecycle,
            self.authenticator,
            self._is_serving,
            self.admission,
            self.figures,
            self.siblings,
        )
        elsewhere = bool(settings.admin_listen)
        if not elsewhere:
            cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(self.fleet, self.siblings), self._server)
        names = door_names(settings) if elsewhere else (*door_names(settings), CLUSTER)
        reflect = settings.reflection and not elsewhere
        self._health = await add_health_and_reflection(self._server, names, reflect=reflect)
        try:
            address = bind(self._server, settings.listen, door_credentials(settings))
        except RuntimeError as error:
            raise ConfigError(f"listen: cannot listen on {self._settings.listen}", field="listen") from error
        warn_of_open_doors(settings, self.authenticator)
        await self._server.start()
        await self._management.start()
        await self.engine.start()
        await self.siblings.start()
        await self._open_http()
        if self._share is None:
            self.fleet.start()
        self._health_task = asyncio.create_task(self._tell_health(self._health))
        logger.info("serving %s on %s", self._model.name, address)
        return address

    async def _meet_workers(self) -> None:
        """Until one that decodes is met, or for a while. Of several processes one that listens gets its part of the
        connections, also while it could not serve what the others can."""
        self.fleet.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(MEET_S):
                while not self.fleet.can_decode:
                    await self.fleet.change()

    async def _open_http(self) -> None:
        settings = self._settings
        await self._open_metrics()
        if not settings.http_place:
            return
        app = build_app(
            self.lifecycle,
            self.figures,
            bodies=Bodies(settings.max_message_bytes, self.bounds.arrivals),
            serving=self._is_serving,
            authenticate=self.authenticator.authenticate,
            metrics=settings.metrics and not settings.metrics_listen,
            keep_alive_s=settings.keep_alive_s,
        )
        tls = listener_context(TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca))
        listener = Listener(settings.http_place, tls, frozenset(settings.tls_client_names), settings.processes > 1)
        self.http = HttpDoor(app, listener, self._http_limits())
        self.http_address = await self.http.start()
        logger.info("OpenAI API on http%s://%s/v1", "s" if tls is not None else "", self.http_address)

    async def _open_metrics(self) -> None:
        settings = self._settings
        if not settings.metrics or not settings.metrics_listen:
            return
        app = build_metrics_app(
            self.lifecycle, self.figures, serving=self._is_serving, authenticate=self.authenticator.authenticate
        )
        shared = settings.processes > 1
        listener = Listener(settings.metrics_listen, shared=shared)
        if not is_local(settings.metrics_listen):
            tls = listener_context(TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca))
            listener = Listener(settings.metrics_listen, tls, frozenset(settings.tls_client_names), shared)
        self.metrics = HttpDoor(app, listener, self._http_limits())
        logger.info("figures on %s", await self.metrics.start())

    def _engine_servicer(self) -> VllmEngineServicer:
        siblings, serving = self.siblings, self._is_serving
        return engine_servicer(
            self._settings, self.lifecycle, self.admission, self.figures, serving, siblings.running, siblings.abort
        )

    def _max_queue_tokens(self) -> int:
        return self._settings.max_queue_tokens or QUEUE_DEPTH * self.fleet.kv_tokens()

    def _is_serving(self) -> bool:
        return self._health is not None and self._health.serving

    def _http_limits(self) -> ConnectionLimits:
        settings = self._settings
        return ConnectionLimits(
            header_bytes=settings.max_metadata_bytes,
            receive_s=settings.request_s,
            write_s=settings.slow_reader_s + LINGER_S,  # the request itself ends before that, and says why
            connections=settings.http_connections,
        )

    async def _tell_health(self, health: Health) -> None:
        """SERVING while a worker can decode."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            serving = self.fleet.can_decode
            if serving != health.serving:
                logger.info("requests can be served" if serving else "requests cannot be served: no decode worker")
            await health.set_serving(serving)
            await self._management.set_serving(serving)
            await self.engine.set_serving(serving)
            await self.siblings.set_serving(serving)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Admits nothing more and lets streams end, up to `seconds` or until `hurry`; then ends the rest."""
        self.admission.close()
        if self._health is not None:
            await self._health.shut_down()
            await self._management.set_serving(False)
            await self.engine.set_serving(False)
            await self.siblings.set_serving(False)
        if self.http is not None:
            self.http.drain()
        waits = [asyncio.create_task(self.admission.idle()), asyncio.create_task(hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        if self.admission.inside:
            logger.warning("%d requests are cut", self.admission.inside)
            self.lifecycle.end_all(Unavailable("the gateway is shutting down", retry_after_s=RETRY_S))
            await asyncio.wait((asyncio.create_task(self.admission.idle()),), timeout=LAST_WORDS_S)

    async def stop(self) -> None:
        """Ends everything at once: calls, sessions with workers, threads."""
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
        if self.http is not None:
            await self.http.stop()
        await self._management.stop()
        await self.engine.stop()
        await self.siblings.stop()
        if self.metrics is not None:
            await self.metrics.stop()
        await self._server.stop(None)
        await self.fleet.stop()
        await self.constraints.stop()
        self._model.threads.shutdown(wait=False, cancel_futures=True)


async def serve(settings: GatewaySettings, share: Share | None = None) -> None:
    """Runs until SIGTERM or SIGINT: the first drains, the second ends. ConfigError where it cannot start. `share`:
    where it is one of several processes."""
    take_together()
    allow_open_files()
    model = await asyncio.to_thread(load_model, settings)
    gateway = Gateway(settings, model, share)
    told, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if told.is_set() else told).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await gateway.start()
        settle()
        await told.wait()
        logger.info("draining for up to %g s", settings.drain_s)
        await gateway.drain(settings.drain_s, hurry)
    finally:
        await gateway.stop()
