"""Places for requests that are on their way: nobody sees anything of one before it is whole, and until then it may take
as much memory as the largest."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from ...errors import Overloaded
from ..incoming import Context
from .callers import Share, caller_of
from .turns_of_tenants import TenantTurns

PATIENCE_S = 1.0  # that a request may be on its way however many wait for a place


class _Place:
    """One request's."""

    __slots__ = ("caller", "granted", "leaving", "scope", "since")

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.granted: asyncio.Future[None] | None = None  # where it had to wait
        self.scope: asyncio.Timeout | None = None
        self.since = 0.0  # by the loop's clock
        self.leaving = False


class Arrivals:
    """One loop owns it. Callers take turns; none has so many places that none is left for others."""

    def __init__(self, places: int, *, patience_s: float = PATIENCE_S) -> None:
        """`places`: requests at once."""
        self._share = Share(places)
        self._patience_s = patience_s
        self._held: dict[str, OrderedDict[_Place, None]] = {}  # by caller, oldest first; none is empty or leaving
        self._leaving = 0
        self._turns = TenantTurns[_Place]()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def taken(self) -> int:
        """Places."""
        return self._share.taken

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return self._turns.total

    def of(self, context: Context) -> AbstractAsyncContextManager[None]:
        """A place for the next request of a call, see `place`."""
        return self.place(caller_of(context.peer() or ""))

    @asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        """Waits for one; the body reads the request. Overloaded where it takes long and has to give way to others: the
        oldest of whoever has most."""
        place = await self._take(caller)
        try:
            async with asyncio.timeout(None) as place.scope:
                if place.leaving:  # before it began
                    place.scope.reschedule(0)
                yield
        except TimeoutError:
            if place.scope is None or not place.scope.expired():
                raise
            raise Overloaded(
                "too many requests are on their way: this one came too slowly, and gave way to others",
                retry_after_s=self._patience_s,
            ) from None
        finally:
            self._leave(place)

    async def _take(self, caller: str) -> _Place:
        place = _Place(caller)
        if not self._turns.waiting(caller) and self._share.free(caller):
            self._grant(place)
            return place
        place.granted = asyncio.get_running_loop().create_future()
        self._turns.add(caller, place)
        self._watch()
        try:
            await place.granted
        except BaseException:
            if place.granted.done() and not place.granted.cancelled():
                self._leave(place)
            else:
                self._turns.remove(caller, place)
            raise
        return place

    def _grant(self, place: _Place) -> None:
        self._share.take(place.caller)
        place.since = asyncio.get_running_loop().time()
        self._held.setdefault(place.caller, OrderedDict())[place] = None
        if place.granted is not None:
            place.granted.set_result(None)

    def _leave(self, place: _Place) -> None:
        self._share.give_back(place.caller)
        if place.leaving:
            self._leaving -= 1
        else:
            self._forget(place)
        while (following := self._turns.pop(self._share.free)) is not None:
            if following.granted is not None and not following.granted.done():  # else its call is over
                self._grant(following)
        self._watch()

    def _forget(self, place: _Place) -> None:
        held = self._held[place.caller]
        del held[place]
        if not held:
            del self._held[place.caller]

    def _watch(self) -> None:
        """Looks again when the next one may be told to give way."""
        if self._timer is None and self._turns.total > self._leaving and self._held:
            self._timer = asyncio.get_running_loop().call_at(self._oldest().since + self._patience_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._turns.total > self._leaving and self._held:
            place = self._oldest()
            if now < place.since + self._patience_s:
                break
            self._forget(place)
            place.leaving = True
            self._leaving += 1
            if place.scope is not None:
                place.scope.reschedule(now)
        self._watch()

    def _oldest(self) -> _Place:
        """Of whoever has most."""
        most = max(self._held.values(), key=lambda held: (len(held), -next(iter(held)).since))
        return next(iter(most))
