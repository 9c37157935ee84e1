"""Where a prompt is computed: by a prefill worker, whose KV then travels, or by the decode worker itself.

Both ways are weighed in seconds, by what the workers told and by what earlier requests saw. The prefill worker: its
queue, the prompt, and the part of the transfer that its computing does not hide. The decode worker: its queue, the
prompt, the decode steps that its chunks ride on, and the delay of each stream that it runs meanwhile.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...v1 import worker_pb2 as pb
from .router import WorkerLoad
from .speeds import Delay

MARGIN = 0.1  # the decode worker must be cheaper by this share: streams that begin meanwhile are not known yet
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of KV; others: 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """`local`: the decode worker computes the prompt."""

    local: bool
    reason: str


class Placement:
    """All that a gateway has seen of transfers, by pair of workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delays: dict[tuple[int, int], Delay] = {}

    def __len__(self) -> int:
        return len(self._delays)

    def forget(self, living: frozenset[int]) -> None:
        """Drops all pairs but those of these workers."""
        self._delays = {pair: delay for pair, delay in self._delays.items() if living.issuperset(pair)}

    def transferred(self, prefill: int, decode: int, nbytes: int, seconds: float) -> None:
        """So long after token 0 the KV had arrived, `nbytes` of it having been moved."""
        self._delays.setdefault((prefill, decode), Delay()).add(nbytes, seconds, self._clock())

    def weigh(
        self, prefill: WorkerLoad, decode: WorkerLoad, prefill_tokens: int, decode_tokens: int, moved_tokens: int
    ) -> Verdict:
        """Tokens that each of them would have to compute, and those whose KV would have to be moved."""
        now = self._clock()
        fast = prefill.prompt_rate.expected(now, decode.prompt_rate.last)
        own = decode.prompt_rate.expected(now, prefill.prompt_rate.last)
        if fast is None or own is None:
            return Verdict(False, f"computed by {prefill.name}, as nothing is measured yet")
        remote = Remote(
            queue=prefill.waiting_tokens / fast,
            prefill=prefill_tokens / fast,
            exposed=0.0,
            moved=moved_tokens * prefill.kv_token_bytes,
            gb_per_s=prefill.pair_rates.get(decode.incarnation, 0.0),
        )
        prior = remote.copying / max(1, prefill.layers)  # all but the last layer's KV goes while others compute
        if (delay := self._delays.get((prefill.incarnation, decode.incarnation))) is not None:
            remote.exposed = delay.expected(remote.moved, now, prior)
        else:
            remote.exposed = prior
        streams = decode.sequences
        chunks = -(-(decode.waiting_tokens + decode_tokens) // max(1, decode.chunk_tokens)) if streams else 0
        local = Local(
            queue=decode.waiting_tokens / own,
            prefill=decode_tokens / own,
            riding=chunks * decode.decode_step_s if decode.chunk_tokens else 0.0,
            streams=streams,
        )
        chosen = local.cost < (1 - MARGIN) * remote.cost
        name = decode.name if chosen else prefill.name
        return Verdict(chosen, f"computed by {name}: {prefill.name} would cost {remote}, {decode.name} {local}")


@dataclass(slots=True)
class Remote:
    """Seconds that a prompt costs by way of a prefill worker."""

    queue: float
    prefill: float
    exposed: float  # of the transfer, not hidden behind computing
    moved: int  # bytes
    gb_per_s: float  # of the pair; 0: not told

    @property
    def cost(self) -> float:
        """All together: until the decode worker can go on."""
        return self.queue + self.prefill + self.exposed

    @property
    def copying(self) -> float:
        """Seconds that the copies take by themselves; 0: not known."""
        return self.moved / 1e9 / self.gb_per_s if self.gb_per_s > 0 else 0.0

    def __str__(self) -> str:
        text = f"{_ms(self.cost)} (queue {_ms(self.queue)}, prefill {_ms(self.prefill)}, transfer {_ms(self.exposed)}"
        if self.copying:
            hidden = max(0.0, 1 - self.exposed / self.copying)
            text += f" of {self.moved / 1e6:.4g} MB at {self.gb_per_s:.3g} GB/s, {hidden:.0%} hidden"
        return text + ")"


@dataclass(slots=True)
class Local:
    """Seconds that a prompt costs where the decode worker computes it."""

    queue: float
    prefill: float
    riding: float  # decode steps that its chunks share
    streams: int  # that are delayed by its computing

    @property
    def cost(self) -> float:
        """All together, every delayed stream counted as much as the request itself."""
        return self.queue + self.prefill + self.riding + self.streams * self.prefill

    def __str__(self) -> str:
        text = f"{_ms(self.cost)} (queue {_ms(self.queue)}, prefill {_ms(self.prefill)}"
        if self.streams:
            text += f", steps {_ms(self.riding)}, {self.streams} streams delayed by {_ms(self.prefill)} each"
        return text + ")"


def kv_token_bytes(form: pb.ModelFormat) -> int:
    """Bytes of KV of a token, all layers."""
    return 2 * form.layers * form.num_kv_heads * form.head_dim * ITEM_BYTES.get(form.kv_dtype, 1)


def pair_rates(pairs: Iterable[pb.PairRate], limit: int) -> dict[int, float]:
    """GB/s by decode worker; at most `limit` of them."""
    rates = {pair.reader: pair.gb_per_s for pair in pairs if pair.gb_per_s > 0}
    return dict(list(rates.items())[:limit])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
