"""Addresses that several processes will listen on: held from before the first to after the last of them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ....errors import ConfigError
from ...settings import GatewaySettings, split_address

FIELDS = ("listen", "http_listen", "admin_listen", "engine_listen", "metrics_listen")


@contextmanager
def held(settings: GatewaySettings) -> Iterator[GatewaySettings]:
    """The settings with the ports that were taken where they ask for any, in the body of a `with`.

    ConfigError where an address is in use, also by other processes that would share it.
    """
    with ExitStack() as stack:
        places = {name: getattr(settings, name) for name in FIELDS} | {"http_listen": settings.http_place}
        for name, address in places.items():
            if address:
                places[name] = stack.enter_context(_held(name, address))
        yield settings.model_copy(update=places)


@contextmanager
def _held(field: str, address: str) -> Iterator[str]:
    """A bound socket that does not listen gets no connections, and keeps others from the address."""
    try:
        holding = _bound(address)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"{field}: cannot listen on {address} ({why})", field=field) from error
    with holding:
        yield f"{address.rpartition(':')[0]}:{holding.getsockname()[1]}"


def _bound(address: str) -> socket.socket:
    host, port = split_address(address)
    bare = host.strip("[]")
    family, kind, protocol, _, place = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]

    def bind(*options: int) -> socket.socket:
        it = socket.socket(family, kind, protocol)
        try:
            for option in options:
                it.setsockopt(socket.SOL_SOCKET, option, 1)
            if family == socket.AF_INET6 and bare == "::":
                it.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # every interface
            it.bind(place)
        except OSError:
            it.close()
            raise
        return it

    with bind(socket.SO_REUSEADDR) as alone:  # who may share it already would else not be noticed
        place = alone.getsockname()
    try:
        return bind(socket.SO_REUSEPORT)
    except OSError:  # connections of one that had it alone linger there; this way it is held less firmly
        return bind(socket.SO_REUSEPORT, socket.SO_REUSEADDR)
