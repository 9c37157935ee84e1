"""Where workers are: names that stand for several addresses are looked up again and again."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from ..settings import DNS_PREFIX, split_address

RESOLVE_S = 5.0  # between two look-ups of a name
MAX_ADDRESSES = 1024  # of one name

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""The IP addresses of a name, for that port; OSError where there are none to be had."""

log = logging.getLogger(__name__)


async def look_up(name: str, port: int) -> list[str]:
    """By the system's resolver, on a thread of the loop's executor."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_literal(place: str) -> bool:
    """Whether `host:port` names an IP address, so that there is nothing to look up."""
    try:
        ipaddress.ip_address(split_address(place)[0].strip("[]"))
    except ValueError:
        return False
    return True


class Name:
    """One configured `NAME:PORT` or `dns:NAME:PORT`."""

    def __init__(
        self,
        place: str,
        on_addresses: Callable[[Sequence[str]], None],
        *,
        resolve: Resolve = look_up,
        interval_s: float = RESOLVE_S,
    ) -> None:
        """`on_addresses` is called with host:port of each address whenever they change. While a name cannot be resolved
        the known ones are kept: a resolver that fails says nothing about workers."""
        self.place = place
        self.reason = "not looked up yet"  # why there are no addresses; empty where there are
        self._host, self._port = split_address(place.removeprefix(DNS_PREFIX))
        self._on_addresses = on_addresses
        self._resolve = resolve
        self._interval_s = interval_s
        self._known: tuple[str, ...] = ()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look_up()
            await asyncio.sleep(self._interval_s)

    async def look_up(self) -> None:
        """Once."""
        try:
            addresses = self._addresses(await self._resolve(self._host, self._port))
        except (OSError, UnicodeError) as error:
            reason = f"cannot be resolved: {error}"
            if reason != self.reason:
                log.warning("workers %s: %s", self.place, reason)
            self.reason = reason
            return
        self.reason = "" if addresses else "has no addresses"
        if addresses != self._known:
            log.info("workers %s: %s", self.place, ", ".join(addresses) or "none")
            self._known = addresses
            self._on_addresses(addresses)

    def _addresses(self, found: Sequence[str]) -> tuple[str, ...]:
        hosts = sorted(set(found))[:MAX_ADDRESSES]
        if all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts) and hosts:
            return (f"{self._host}:{self._port}",)  # one machine's ways to itself are not several workers
        return tuple(f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts)
