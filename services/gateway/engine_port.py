"""The port for an LLM router alone, where there is one: the engine protocol, without keys, as a tenant of its own.

Routers that drive engines over gRPC send no key and show no certificate. Who may connect is decided by the address.
"""

import logging
from collections.abc import Callable, Iterable

from ...smg import vllm_engine_pb2_grpc
from ..security.cluster import is_local
from ..settings import GatewaySettings
from .auth import Authenticator, Caller, Header
from .security import Bounds
from .side_port import SidePort
from .vllm_engine.servicer import SERVICE, VllmEngineServicer

logger = logging.getLogger(__name__)


class EnginePort(SidePort):
    """Does nothing where the settings name no `engine_listen`."""

    def __init__(
        self,
        settings: GatewaySettings,
        bounds: Bounds,
        auth: Authenticator,
        servicer: Callable[[], VllmEngineServicer],
    ) -> None:
        """`auth`: of the other doors; it knows the tenant's limits."""
        super().__init__(settings, bounds)
        self._auth = auth
        self._servicer = servicer
        self.address = ""  # host:port, where it listens

    async def start(self) -> str:
        """Serves; returns host:port, or nothing. ConfigError where the address cannot be had."""
        settings, who = self._settings, self._settings.engine_tenant
        if not settings.engine_listen or not settings.vllm_engine:
            return ""
        self.address = await self.serve(
            "engine_listen",
            _AlwaysOne(self._auth, who),
            lambda server: vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer(), server),
            (SERVICE,),
            streams=settings.max_calls,  # a router's clients share its connection
        )
        logger.info("an LLM router is served on %s without a key, as tenant %s", self.address, who)
        if not is_local(settings.engine_listen) and settings.tls_client_ca is None:
            logger.warning("%s reached from other machines: whoever can connect is tenant %s", self.address, who)
        return self.address


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
