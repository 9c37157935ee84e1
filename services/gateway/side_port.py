"""A port beside the doors': of its own address, services and callers."""

from collections.abc import Callable, Sequence

import grpc.aio

from ...errors import ConfigError
from ..grpc_setup import Health, add_health_and_reflection, bind
from ..security.cluster import is_local
from ..settings import GatewaySettings
from .auth import Authenticator
from .security import Bounds, door_credentials, door_server


class SidePort:
    """Serves nothing before `serve`. TLS as at the doors, but not on a loopback address."""

    def __init__(self, settings: GatewaySettings, bounds: Bounds) -> None:
        """Of the gateway."""
        self._settings = settings
        self._bounds = bounds
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None

    async def serve(
        self,
        field: str,
        access: Authenticator,
        add: Callable[[grpc.aio.Server], None],
        names: Sequence[str],
        *,
        admins: Sequence[str] = (),
        reflect: bool = False,
        streams: int = 0,
    ) -> str:
        """Returns host:port. `field`: the setting that says where; `access`: who may call; `add`: adds the services,
        whose `names` health, and with `reflect` reflection, tells; `admins`: services for admins alone; `streams`:
        calls at once of one connection, 0: as at the doors. ConfigError (field) where the address cannot be had.
        """
        settings, listen = self._settings, str(getattr(self._settings, field))
        credentials = None if is_local(listen) else door_credentials(settings)
        tls = credentials is not None
        server = door_server(settings, access, self._bounds, tuple(admins), tls=tls, streams=streams)
        add(server)
        self._health = await add_health_and_reflection(server, names, reflect=reflect)
        try:
            address = bind(server, listen, credentials)
        except RuntimeError as error:
            raise ConfigError(f"{field}: cannot listen on {listen}", field=field) from error
        await server.start()
        self._server = server
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
