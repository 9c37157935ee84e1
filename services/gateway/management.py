"""The port for those who run a gateway, where there is one: orders to the cluster, reflection, health."""

import logging
from collections.abc import Sequence

import grpc.aio

from ...errors import ConfigError
from ...v1 import cluster_pb2_grpc
from ..grpc_setup import Health, add_health_and_reflection, bind
from ..security.cluster import is_local
from ..settings import GatewaySettings
from .auth import Authenticator
from .cluster_service import ClusterServicer
from .fleet import Fleet
from .processes.siblings import Siblings
from .security import door_credentials, door_server

logger = logging.getLogger(__name__)


class Management:
    """Does nothing where the settings name no `admin_listen`. Callers show an admin's credentials, as everywhere."""

    def __init__(
        self,
        settings: GatewaySettings,
        auth: Authenticator,
        fleet: Fleet,
        siblings: Siblings,
        service_names: Sequence[str],
    ) -> None:
        """`service_names`: what reflection tells of."""
        self._settings = settings
        self._auth = auth
        self._fleet = fleet
        self._siblings = siblings
        self._names = tuple(service_names)
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None

    async def start(self) -> str:
        """Serves; returns host:port, or nothing. ConfigError where the address cannot be had."""
        listen = self._settings.admin_listen
        if not listen:
            return ""
        credentials = None if is_local(listen) else door_credentials(self._settings)
        server = door_server(self._settings, self._auth, self._names, tls=credentials is not None)
        cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(self._fleet, self._siblings), server)
        self._health = await add_health_and_reflection(server, self._names, reflect=self._settings.reflection)
        try:
            address = bind(server, listen, credentials)
        except RuntimeError as error:
            raise ConfigError(f"admin_listen: cannot listen on {listen}", field="admin_listen") from error
        await server.start()
        self._server = server
        logger.info("orders to the cluster are taken on %s", address)
        return address

    async def set_serving(self, serving: bool) -> None:
        """What health tells here."""
        if self._health is not None:
            await self._health.set_serving(serving)

    async def stop(self) -> None:
        """Ends its calls at once. Idempotent."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
