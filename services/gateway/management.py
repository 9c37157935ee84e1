"""The port for those who run a gateway, where there is one: orders to the cluster, reflection, health."""

import logging
from collections.abc import Sequence

from ...v1 import cluster_pb2_grpc
from ..settings import GatewaySettings
from .auth import Authenticator
from .cluster_service import ClusterServicer
from .fleet import Fleet
from .processes.siblings import Siblings
from .security import Bounds
from .side_port import SidePort

logger = logging.getLogger(__name__)


class Management(SidePort):
    """Does nothing where the settings name no `admin_listen`. Callers show an admin's credentials, as everywhere."""

    def __init__(
        self,
        settings: GatewaySettings,
        bounds: Bounds,
        auth: Authenticator,
        fleet: Fleet,
        siblings: Siblings,
        service_names: Sequence[str],
    ) -> None:
        """`service_names`: what reflection tells of."""
        super().__init__(settings, bounds)
        self._auth = auth
        self._servicer = ClusterServicer(fleet, siblings)
        self._names = tuple(service_names)

    async def start(self) -> str:
        """Serves; returns host:port, or nothing. ConfigError where the address cannot be had."""
        if not self._settings.admin_listen:
            return ""
        address = await self.serve(
            "admin_listen",
            self._auth,
            lambda server: cluster_pb2_grpc.add_ClusterServicer_to_server(self._servicer, server),
            self._names,
            admins=self._names,
            reflect=self._settings.reflection,
        )
        logger.info("orders to the cluster are taken on %s", address)
        return address
