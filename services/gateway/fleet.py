"""All workers of a gateway: who is ready, whether they fit together, and who must know of whom."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ...errors import Mismatch, Unavailable
from ...v1 import worker_pb2 as pb
from ..grpc_setup import OpenChannel, open_channel
from ..identity import ProcessIdentity
from .cached_blocks import CachedBlocks
from .discovery import RESOLVE_S, Name, Resolve, is_literal, look_up
from .router import Role, WorkerLoad
from .worker_client import WorkerClient
from .worker_session import RETRY_S, WorkerSession

FORMAT_FIELDS = (
    "model",
    "fingerprint",
    "kv_dtype",
    "page_size",
    "layers",
    "kv_heads",
    "head_dim",
    "ranks",
)
MAX_REASONS = 8


class Fleet:
    """One loop owns it."""

    def __init__(
        self,
        addresses: Sequence[str],
        gateway: ProcessIdentity,
        model: str,
        *,
        silence_s: float,
        on_change: Callable[[], None] = lambda: None,
        resolve: Resolve = look_up,
        resolve_s: float = RESOLVE_S,
        channel: OpenChannel = open_channel,
    ) -> None:
        """`addresses`: host:port; each address of a name (also `dns:name:port`) is a worker. `model`: served name.
        `on_change`: a worker joined, left or began to drain. `resolve_s`: between two look-ups of a name. `channel`:
        opens one to an address."""
        places = list(dict.fromkeys(addresses))
        self._places: dict[str, tuple[str, ...]] = {place: (place,) for place in places if is_literal(place)}
        self._names = [
            Name(place, partial(self._place, place), resolve=resolve, interval_s=resolve_s)
            for place in places
            if place not in self._places
        ]
        self._clients: dict[str, WorkerClient] = {}
        self._new_client = partial(
            WorkerClient, gateway=gateway, model=model, host=self, silence_s=silence_s, channel=channel
        )
        self._ready: dict[int, WorkerSession] = {}
        self._on_change = on_change
        self._model = model
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._started = False
        self._change = asyncio.Event()
        self.blocks = CachedBlocks(self._watch_caches)

    def start(self) -> None:
        """Begins to connect."""
        self._started = True
        self._tasks = {name.place: asyncio.create_task(name.run()) for name in self._names}
        self._meet()

    async def stop(self) -> None:
        """Ends all sessions: the workers drop what they have of us."""
        self._started = False
        tasks = [*self._tasks.values(), *(client.task for client in self._clients.values() if client.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = {}

    @property
    def clients(self) -> list[WorkerClient]:
        """One for each address."""
        return list(self._clients.values())

    def _place(self, place: str, addresses: Sequence[str]) -> None:
        """What a name stands for now."""
        self._places[place] = tuple(addresses)
        self._meet()

    def _meet(self) -> None:
        """Connects to what is new; what is no longer named is left once its session ends by itself."""
        if not self._started:
            return
        wanted = dict.fromkeys(address for addresses in self._places.values() for address in addresses)
        for address in wanted:
            client = self._clients.get(address)
            if client is None:
                client = self._clients[address] = self._new_client(address)
                client.task = asyncio.create_task(client.run())
                client.task.add_done_callback(partial(self._forget, address))
            client.leaving = False
        for address, client in self._clients.items():
            if address not in wanted:
                client.leave()

    def _forget(self, address: str, _: object) -> None:
        self._clients.pop(address, None)
        if self._started:
            self._meet()  # it may have been named again meanwhile

    def session(self, incarnation: int) -> WorkerSession:
        """A ready worker's."""
        return self._ready[incarnation]

    def loads(self) -> list[WorkerLoad]:
        """Of all ready workers, as the router wants them."""
        return [session.load for session in self._ready.values() if not session.ended.done()]

    async def change(self) -> None:
        """Returns when the next worker joins, leaves, or begins or ceases to drain."""
        await self._change.wait()

    def count(self, *roles: Role) -> int:
        """Ready workers of these roles that take new work."""
        return sum(load.role in roles and not load.draining for load in self.loads())

    @property
    def can_decode(self) -> bool:
        """Whether requests can be served."""
        return self.count(Role.DECODE, Role.BOTH) > 0

    def largest(self) -> int:
        """The most tokens of prompt and output that any decoding worker takes; Unavailable where there is none."""
        sizes = [load.max_tokens for load in self.loads() if load.role is not Role.PREFILL and not load.draining]
        if not sizes:
            raise self.unavailable()
        return max(sizes)

    def kv_tokens(self) -> int:
        """Tokens whose KV fits into all workers that decode."""
        return sum(load.pages * load.page_size for load in self.loads() if load.role is not Role.PREFILL)

    def widest(self) -> int:
        """The most sequences that any decoding worker runs at once; Unavailable where there is none."""
        sizes = [load.max_batch for load in self.loads() if load.role is not Role.PREFILL and not load.draining]
        if not sizes:
            raise self.unavailable()
        return max(sizes)

    def unavailable(self) -> Unavailable:
        """Why no worker can decode."""
        reasons = [f"{name.place}: {name.reason}" for name in self._names if name.reason]
        reasons += [f"{client.address}: {client.reason}" for client in self.clients if client.session is None]
        reasons += [f"{load.name}: draining" for load in self.loads() if load.draining]
        if not self._places and not self._names:
            reasons = ["none is configured"]
        text = "; ".join(reasons[:MAX_REASONS]) or "none of the connected workers decodes"
        return Unavailable(f"no decode worker: {text}", retry_after_s=RETRY_S)

    # What clients call

    def changed(self) -> None:
        """A worker joined, left or began to drain."""
        passed, self._change = self._change, asyncio.Event()
        passed.set()
        self._on_change()

    def check(self, session: WorkerSession) -> None:
        """Mismatch names both values. The first worker that is connected sets the format."""
        if session.format.model != self._model:
            raise Mismatch(f"{session.name} refused: model {self._model!r} here, {session.format.model!r} there")
        for other in self._ready.values():
            if other.incarnation == session.incarnation:
                raise Mismatch(f"{session.name} is connected already, at another address")
            check_format(session.name, other.format, session.format)

    def joined(self, session: WorkerSession) -> None:
        """Decode workers learn of prefill workers before the first request."""
        self._ready[session.incarnation] = session
        session.blocks = self.blocks
        if self.blocks.watched:
            session.watch_cache(True)
        if session.load.role is Role.PREFILL:
            self._tell_peers()
        elif session.load.role is Role.DECODE:
            session.tell_peers(self._prefill_peers())
        self.changed()

    def left(self, session: WorkerSession) -> None:
        """Nothing goes to it any more."""
        del self._ready[session.incarnation]
        self.blocks.gone(session.incarnation)
        if session.load.role is Role.PREFILL:
            self._tell_peers()
        self.changed()

    def _watch_caches(self, on: bool) -> None:
        for session in list(self._ready.values()):
            session.watch_cache(on)

    def _prefill_peers(self) -> list[pb.Peer]:
        return [session.peer for session in self._ready.values() if session.load.role is Role.PREFILL]

    def _tell_peers(self) -> None:
        peers = self._prefill_peers()
        for session in list(self._ready.values()):
            if session.load.role is Role.DECODE:
                session.tell_peers(peers)


def check_format(name: str, here: pb.ModelFormat, there: pb.ModelFormat) -> None:
    """Mismatch with the first field that differs, and both values."""
    for field in FORMAT_FIELDS:
        ours, theirs = getattr(here, field), getattr(there, field)
        if ours != theirs:
            raise Mismatch(f"{name} refused: {field} {ours} here, {theirs} there")
