"""The port for an LLM router alone, where there is one: the engine protocol, without keys, as a tenant of its own.

Routers that drive engines over gRPC send no key and show no certificate. Who may connect is decided by the address.
"""

import logging
from collections.abc import Callable, Iterable

import grpc.aio

from ...errors import ConfigError
from ...smg import vllm_engine_pb2_grpc
from ..grpc_setup import Health, add_health_and_reflection, bind
from ..security.cluster import is_local
from ..settings import GatewaySettings
from .auth import Authenticator, Caller, Header
from .security import door_credentials, door_server
from .vllm_engine.servicer import SERVICE, VllmEngineServicer

logger = logging.getLogger(__name__)


class EnginePort:
    """Does nothing where the settings name no `engine_listen`."""

    def __init__(
        self, settings: GatewaySettings, auth: Authenticator, servicer: Callable[[], VllmEngineServicer]
    ) -> None:
        """`auth`: of the other doors; it knows the tenant's limits."""
        self._settings = settings
        self._auth = auth
        self._servicer = servicer
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None
        self.address = ""  # host:port, where it listens

    async def start(self) -> str:
        """Serves; returns host:port, or nothing. ConfigError where the address cannot be had."""
        settings = self._settings
        if not settings.engine_listen or not settings.vllm_engine:
            return ""
        local = is_local(settings.engine_listen)
        credentials = None if local else door_credentials(settings)
        access = _AlwaysOne(self._auth, settings.engine_tenant)
        server = door_server(settings, access, (), tls=credentials is not None)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer(), server)
        self._health = await add_health_and_reflection(server, (SERVICE,), reflect=False)
        try:
            self.address = bind(server, settings.engine_listen, credentials)
        except RuntimeError as error:
            message = f"engine_listen: cannot listen on {settings.engine_listen}"
            raise ConfigError(message, field="engine_listen") from error
        await server.start()
        self._server = server
        who = settings.engine_tenant
        logger.info("an LLM router is served on %s without a key, as tenant %s", self.address, who)
        if not local and settings.tls_client_ca is None:
            logger.warning("%s reached from other machines: whoever can connect is tenant %s", self.address, who)
        return self.address

    async def set_serving(self, serving: bool) -> None:
        """What health tells here."""
        if self._health is not None:
            await self._health.set_serving(serving)

    async def stop(self) -> None:
        """Ends its calls at once. Idempotent."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


class _AlwaysOne(Authenticator):
    """Every caller is one tenant, whatever it shows; with the limits that the file of keys says now."""

    def __init__(self, auth: Authenticator, name: str) -> None:
        super().__init__()
        self._auth = auth
        self._name = name

    @property
    def enabled(self) -> bool:
        return True

    def identify(self, headers: Iterable[Header]) -> Caller:
        return Caller(self._auth.named(self._name))
