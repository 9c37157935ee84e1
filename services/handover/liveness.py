"""Watches the processes at the other ends of links: silence, fencing, proof of death.

On one host (`kvtransfer.process.host_id` equal) a pidfd opened at the handshake proves a peer's death, and a peer that
was silent for too long is killed through it, so that a frozen one cannot pin pages for ever. Across hosts nothing is
proven here: the link is closed and the peer stays undecided.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import Unavailable
from ...kvtransfer.process import ProcessHandle
from ..identity import ProcessIdentity

log = logging.getLogger(__name__)

SILENCE_S = 10.0
_SWEEPS = 10  # checks in the time of allowed silence


class PeerWatch:
    """One peer process, from its handshake to its death. Made by `Liveness.watch`; lives on the event loop."""

    def __init__(
        self,
        owner: "Liveness",
        identity: ProcessIdentity,
        handle: ProcessHandle | None,
        on_dead: Callable[[], None],
        on_silent: Callable[[], None],
    ) -> None:
        self.identity = identity
        self.dead = False
        self._owner = owner
        self._handle = handle
        self._on_dead = on_dead
        self._on_silent = on_silent
        self._heard = owner.now()
        self._fenced = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        if handle is not None:
            self._loop.add_reader(handle.fileno(), self._ended)

    @property
    def provable(self) -> bool:
        """Whether its death will be proven."""
        return self._handle is not None

    def heard(self) -> None:
        """A message of it came."""
        self._heard = self._owner.now()

    def close(self) -> None:
        """Watches no longer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._owner.forget(self)
        if self._handle is not None:
            self._loop.remove_reader(self._handle.fileno())
            self._handle.close()

    def sweep(self, silence_s: float, pause_s: float) -> None:
        """Fences a peer that is silent for `silence_s`, less `pause_s` in which this process did not listen itself."""
        self._heard += pause_s
        if self._fenced or self._owner.now() - self._heard < silence_s:
            return
        if self._handle is None or self.identity.pid in (os.getpid(), os.getppid()):
            log.warning("%s is silent for %.0f s; nothing proves that it is gone", self.identity.name, silence_s)
            self._still_there()
            return
        log.warning("%s (pid %d) is silent for %.0f s: killing it", self.identity.name, self.identity.pid, silence_s)
        try:
            self._handle.kill()
            self._fenced = True
        except PermissionError:
            log.error("%s is another user's process: it cannot be killed from here", self.identity.name)
            self._still_there()

    def _still_there(self) -> None:
        """It cannot be fenced: silence counts anew."""
        self.heard()
        self._on_silent()

    def _ended(self) -> None:
        self.dead = True
        self.close()
        log.info("%s (pid %d) is gone", self.identity.name, self.identity.pid)
        self._on_dead()


class Liveness:
    """All peers that this process watches. On the event loop."""

    def __init__(self, host: str, *, silence_s: float = SILENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        """`host`: our own `host_id()`. `silence_s`: from then on a silent peer is fenced."""
        self.silence_s = silence_s
        self.now = clock
        self._host = host
        self._watches: set[PeerWatch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def open(self, identity: ProcessIdentity) -> ProcessHandle | None:
        """A handle of a peer that has just introduced itself; None where its death cannot be proven (another host).

        The handle is that of the peer for certain only once the peer answered something that was said after this call:
        until then its process may have ended and its pid may be another's. Unavailable if it ended already.
        """
        if identity.host != self._host:
            log.warning("%s runs on another host: its death cannot be proven from here", identity.name)
            return None
        handle = ProcessHandle.open(identity.pid, identity.host)
        if handle is None:
            if not Path(f"/proc/{identity.pid}").exists():
                raise Unavailable(f"{identity.name} (pid {identity.pid}) is no longer there")
            log.warning("no pidfd of %s to be had: its death cannot be proven", identity.name)
        return handle

    def watch(
        self,
        identity: ProcessIdentity,
        handle: ProcessHandle | None,
        *,
        on_dead: Callable[[], None],
        on_silent: Callable[[], None],
    ) -> PeerWatch:
        """Watches a peer from now on and owns `handle`.

        `on_dead`: its end is proven; called once, at most. `on_silent`: it is silent and cannot be fenced; again after
        each further `silence_s`.
        """
        watch = PeerWatch(self, identity, handle, on_dead, on_silent)
        self._watches.add(watch)
        if self._timer is None:
            self._arm()
        return watch

    def forget(self, watch: PeerWatch) -> None:
        """By `PeerWatch.close`."""
        self._watches.discard(watch)
        if not self._watches and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Watches nobody any more."""
        for watch in tuple(self._watches):
            watch.close()

    def _arm(self) -> None:
        interval = self.silence_s / _SWEEPS
        self._due = self.now() + interval
        self._timer = asyncio.get_running_loop().call_later(interval, self._sweep)

    def _sweep(self) -> None:
        # A late timer means that we were stopped or starved: what was sent to us meanwhile is still unread.
        late = self.now() - self._due
        pause = late if late > self.silence_s / _SWEEPS else 0.0
        self._arm()
        for watch in tuple(self._watches):
            watch.sweep(self.silence_s, pause)
