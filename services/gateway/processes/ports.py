"""Addresses that several processes will listen on: held from before the first to after the last of them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ....errors import ConfigError
from ...settings import GatewaySettings, split_address

FIELDS = ("listen", "http_listen", "admin_listen", "metrics_listen")


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
    with socket.socket(family, kind, protocol) as alone:  # with the option, whoever has the address would share it
        _prepare(alone, bare)
        alone.bind(place)
        place = alone.getsockname()
    holding = socket.socket(family, kind, protocol)
    try:
        _prepare(holding, bare)
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holding.bind(place)
    except OSError:
        holding.close()
        raise
    return holding


def _prepare(holding: socket.socket, host: str) -> None:
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if holding.family == socket.AF_INET6 and host == "::":
        holding.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # every interface
