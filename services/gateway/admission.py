"""Who may come in: a queue that is bounded in answers and in tokens, and what each tenant may have of it.

Whoever does not get in is told so at once, with the time after which it is worth coming back: by the rate at which the
gateway empties, or by the exact time at which a tenant's minute is refilled.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ...engine.output_length import OutputLength
from ...errors import DeadlineExceeded, InvalidRequest, Overloaded, TwostrokeError, Unavailable
from ..security.tenant import ANYONE, Tenant
from .board import Board, Cell
from .ledger import Cost, Ledger, LocalLedger, Refusal
from .place import Place
from .queue import Entry, Queue

RETRY_S = 1.0  # where nothing was measured
LEAST_RETRY_S, MOST_RETRY_S = 0.1, 60.0
SPREAD = 0.25  # refused clients come back spread over so much longer, so that they do not all meet again
MAX_TENANTS = 100  # of which refusals are counted by name
OTHERS = "others"


class Admission:
    """One loop owns it."""

    def __init__(
        self,
        limit: int,
        ledger: Ledger | None = None,
        *,
        board: Board | None = None,
        max_tokens: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`limit`: answers inside. `ledger`: what tenants have taken; None: one of this process alone. `board`: what is
        inside the processes that share the limit (two that decide at the same moment may both take the last place);
        None: there is one. `max_tokens`:
        to be computed for those inside, at most; 0: any number. `draw`: from 0 to 1."""
        self.ledger: Ledger = LocalLedger() if ledger is None else ledger
        self.board = Board() if board is None else board
        self.queue = Queue(limit, clock, self.board)
        self.output_length = OutputLength()
        self.refusals: Counter[tuple[str, str]] = Counter()  # by reason and tenant
        self.on_refusal: Callable[[str, str], None] | None = None  # is told the same
        self._named: set[str] = set()
        self._max_tokens = max_tokens
        self._draw = draw
        self._inside = 0
        self._open = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def inside(self) -> int:
        """Answers of requests that are admitted and not yet gone."""
        return self._inside

    @property
    def is_open(self) -> bool:
        """Whether anything is admitted at all."""
        return self._open

    @property
    def max_tokens(self) -> int:
        """That may be still to be computed; 0: any number."""
        return self._max_tokens()

    @contextmanager
    def slot(
        self, answers: int = 1, tenant: Tenant = ANYONE, *, priority: int = 0, counted: bool = True
    ) -> Iterator[Place]:
        """A place for each answer for the time of the `with` block, but never more than there are in all, or for its
        tenant. `counted`: as a request of the tenant's minute.

        Overloaded when too few are free, Unavailable after `close`.
        """
        if not self._open:
            raise Unavailable("the gateway is shutting down", retry_after_s=RETRY_S)
        places = max(1, min(answers, self.queue.most))
        room = places <= self.queue.most - self.queue.all_places
        own = min(places, tenant.limits.max_requests or places)
        if (refusal := self.ledger.acquire(tenant, own)) is not None:
            self._refuse_tenant(tenant, refusal, own)
        place = Place(self, Entry(priority, places), tenant, answers)
        try:
            if counted:
                self.charge(tenant, Cost(requests=1))
            if not room:
                self._make_places(tenant, priority, places)
            with self._seated(place):
                yield place
        finally:
            self.ledger.release(tenant, own)

    @contextmanager
    def _seated(self, place: Place) -> Iterator[None]:
        self.queue.enter(place.entry)
        self._count_inside(place.entry.places)
        self._idle.clear()
        ours = False
        try:
            yield
        except TwostrokeError as error:
            ours = not isinstance(error, (InvalidRequest, DeadlineExceeded))
            raise
        finally:
            place.settle(ours=ours)
            self.queue.leave(place.entry)
            self._count_inside(-place.entry.places)
            if not self._inside:
                self._idle.set()

    def _count_inside(self, places: int) -> None:
        self._inside += places
        self.board.tell(Cell.INSIDE, self._inside)

    # What a place asks for

    def expected_output(self, max_tokens: int) -> int:
        """Tokens that an answer is expected to have."""
        return min(max_tokens, self.output_length.expected())

    def check_tokens(self, place: Place, tokens: int) -> None:
        """Overloaded where there is no room for them; whoever is alone inside has room."""
        queue, most = self.queue, self.max_tokens
        before = queue.all_tokens
        lacking = before + tokens - most
        if not most or lacking <= 0 or not before:
            return
        if queue.make_room(place.entry.priority, tokens=min(lacking, before)):
            return
        self._refuse(
            "queue_tokens",
            place.tenant,
            f"{before} tokens are to be computed for requests that came before, and this one adds {tokens}: more "
            f"than the {most} of max_queue_tokens",
            self._retry_s(min(lacking, before), queue.tokens_rate),
        )

    def charge(self, tenant: Tenant, cost: Cost) -> None:
        """Overloaded where the tenant's minute does not hold it."""
        if (refusal := self.ledger.charge(tenant, cost)) is not None:
            self._refuse_tenant(tenant, refusal, 0)

    def refuse_late(self, tenant: Tenant, wait_s: float, left_s: float) -> NoReturn:
        """Its deadline would pass in the queue: which is full for it, while nothing has begun that could time out."""
        self._refuse(
            "deadline",
            tenant,
            f"prompts that came before keep the workers busy for about {wait_s:.1f} s more, and the deadline is in "
            f"{left_s:.1f} s",
            min(max(wait_s - left_s, LEAST_RETRY_S), MOST_RETRY_S),
        )

    def displaced(self, tenant: Tenant) -> Overloaded:
        """What a request is told whose place a more urgent one took."""
        self._count("displaced", tenant)
        retry_s = self._retry_s(self.queue.all_tokens or 1, self.queue.tokens_rate)
        return Overloaded("more urgent requests took its place in the queue", retry_after_s=retry_s)

    # Refusals

    def _make_places(self, tenant: Tenant, priority: int, places: int) -> None:
        queue = self.queue
        lacking = queue.all_places + places - queue.most
        if lacking > 0 and not queue.make_room(priority, places=lacking):
            message = f"{queue.all_places} requests are being served already"
            self._refuse("queue_places", tenant, message, self._retry_s(lacking, queue.places_rate))

    def _refuse_tenant(self, tenant: Tenant, refusal: Refusal, places: int) -> NoReturn:
        limit, inside, wait_s = refusal.limit, refusal.inside, refusal.wait_s
        if wait_s is not None:
            what = refusal.limited.removesuffix("_per_minute").replace("_", " ")
            message = f"tenant {tenant.name!r} has used up the {limit} {what} a minute that it may have"
            self._refuse(refusal.limited, tenant, message, wait_s)
        message = f"{inside} requests of tenant {tenant.name!r} are being served already, of {limit} that it may have"
        rate = self.queue.places_rate
        if rate is not None:  # its own share of it
            rate *= min(1.0, inside / max(1, self.queue.all_places))
        self._refuse(refusal.limited, tenant, f"{message} at once", self._retry_s(inside + places - limit, rate))

    def _refuse(self, reason: str, tenant: Tenant, message: str, retry_s: float) -> NoReturn:
        self._count(reason, tenant)
        raise Overloaded(message, retry_after_s=retry_s)

    def _count(self, reason: str, tenant: Tenant) -> None:
        if len(self._named) < MAX_TENANTS:
            self._named.add(tenant.name)
        name = tenant.name if tenant.name in self._named else OTHERS
        self.refusals[reason, name] += 1
        if self.on_refusal is not None:
            self.on_refusal(reason, name)

    def _retry_s(self, lacking: float, rate: float | None) -> float:
        """Seconds until so much is free, by what was measured."""
        seconds = lacking / rate if rate else RETRY_S
        return min(max(seconds * (1 + SPREAD * self._draw()), LEAST_RETRY_S), MOST_RETRY_S)

    # The end

    def close(self) -> None:
        """Admits nothing from now on."""
        self._open = False

    async def idle(self) -> None:
        """Returns when nobody is inside."""
        await self._idle.wait()
