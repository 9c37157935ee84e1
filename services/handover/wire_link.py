"""Protobuf of the link between a decode and a prefill worker, to and from the plain messages of `kvtransfer`.

Beyond the handshake and these functions, the hand-over knows no protobuf. Reading refuses (Mismatch) what no honest
peer sends: the stream then ends, and nothing of the message takes effect.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...engine.request import FinishReason, SequenceKey
from ...errors import Mismatch
from ...kvtransfer import messages as kv
from ...v1 import worker_pb2 as pb
from ..durations import microseconds

DIGEST_BYTES = 8
MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_VALID_S = 86_400.0
MAX_WAYS = 8
MAX_DESCRIPTOR = 1 << 17
TRANSPORTS = ("shm", "cuda_ipc", "nixl")
EXPORTED = frozenset({"nixl"})  # of these each prefill worker gets a descriptor of its own


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """A pool that this decode worker lets others write into."""

    pool: int  # its name: 64 bits, drawn with the process
    pages: int  # page 0, the sink, counted in
    page_bytes: int  # of one page of one layer
    descriptor: bytes  # of `transport`; empty: made for each prefill worker that wants it
    transport: str = "shm"
    further: tuple[tuple[str, bytes], ...] = ()  # slower ways: transport, descriptor

    def ways(self) -> Iterator["PoolOffer"]:
        """One offer for each way, fastest first."""
        for transport, descriptor in ((self.transport, self.descriptor), *self.further):
            yield replace(self, transport=transport, descriptor=descriptor, further=())

    def message(self) -> pb.PoolExport:
        """As it goes over the wire."""
        ways = [pb.TransportOffer(name=way.transport, descriptor=way.descriptor) for way in self.ways()]
        return pb.PoolExport(pool=self.pool, pages=self.pages, page_bytes=self.page_bytes, transports=ways)


def read_offer(message: pb.PoolExport) -> PoolOffer:
    """The ways of the offer that we know. Mismatch where there is none."""
    known = [(way.name, way.descriptor) for way in message.transports[:MAX_WAYS] if way.name in TRANSPORTS]
    if not known:
        names = ", ".join(way.name for way in message.transports[:MAX_WAYS]) or "none"
        raise Mismatch(f"transports: {', '.join(TRANSPORTS)} here, {names} there")
    for name, descriptor in known:
        if len(descriptor) > MAX_DESCRIPTOR or not (descriptor or name in EXPORTED):
            raise Mismatch(f"transports: a descriptor of {len(descriptor)} bytes for {name}")
    (transport, descriptor), *further = known
    return PoolOffer(message.pool, message.pages, message.page_bytes, descriptor, transport, tuple(further))


def read_export(message: pb.TransportOffer, offer: PoolOffer, transport: str) -> PoolOffer:
    """The offer by the way that was asked for. Mismatch where it is another one."""
    if message.name != transport or not 0 < len(message.descriptor) <= MAX_DESCRIPTOR:
        raise Mismatch(f"transport: {transport} asked for, {message.name} with {len(message.descriptor)} bytes came")
    return replace(offer, transport=transport, descriptor=message.descriptor, further=())


def check_format(ours: pb.ModelFormat, theirs: pb.ModelFormat) -> None:
    """Mismatch naming the first field that differs, and both values. Served names may differ: the fingerprint tells."""
    for field in pb.ModelFormat.DESCRIPTOR.fields:
        if field.name == "model":
            continue
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here != there:
            raise Mismatch(f"{field.name}: {here} here, {there} there")


def check_incarnation(ours: int, expected: int) -> None:
    """Mismatch where the peer wants another process than this one (0: any will do)."""
    if expected not in (0, ours):
        raise Mismatch(f"incarnation: {ours:016x} here, {expected:016x} expected")


def write_key(key: SequenceKey) -> pb.SequenceKey:
    """A sequence's name."""
    return pb.SequenceKey(gateway=key.gateway, request=key.request, sample=key.sample, attempt=key.attempt)


def read_key(message: pb.SequenceKey) -> SequenceKey:
    """A sequence's name."""
    return SequenceKey(message.gateway, message.request, message.sample, message.attempt)


def from_reader(message: kv.FromReader, form: pb.ModelFormat) -> pb.FromDecode:
    """What a decode worker says; `form` gives a ticket its rank and KV-head range."""
    match message:
        case kv.Ticket():
            if not isinstance(message.key, SequenceKey):
                raise TypeError("a ticket's key is a SequenceKey")
            ticket = pb.Ticket(
                ticket=message.ticket,
                key=write_key(message.key),
                pool=message.pool,
                pages=message.pages,
                first_position=message.first_position,
                valid_ms=max(1, round(message.valid_s * 1000)),
                rank=form.rank,
                first_kv_head=form.first_kv_head,
                num_kv_heads=form.num_kv_heads,
            )
            return pb.FromDecode(ticket=ticket)
        case kv.Revoke(ticket=number):
            return pb.FromDecode(revoke=pb.Revoke(ticket=number))
        case kv.Accepted(ticket=number):
            return pb.FromDecode(accepted=pb.Accepted(ticket=number))
        case kv.Resend():
            resend = pb.Resend(ticket=message.ticket, ordinals=message.ordinals, round=message.round)
            return pb.FromDecode(resend=resend)


def read_from_reader(message: pb.FromDecode, form: pb.ModelFormat, pool: PoolOffer) -> kv.FromReader | None:
    """What a decode worker with this pool said; None for a heartbeat."""
    match message.WhichOneof("kind"):
        case "ticket":
            return _read_ticket(message.ticket, form, pool)
        case "revoke":
            return kv.Revoke(_number(message.revoke.ticket))
        case "accepted":
            return kv.Accepted(_number(message.accepted.ticket))
        case "resend":
            ordinals = tuple(message.resend.ordinals)
            if any(ordinal >= pool.pages for ordinal in ordinals):
                raise Mismatch("resend: an ordinal beyond the pool")
            return kv.Resend(_number(message.resend.ticket), ordinals, message.resend.round)
        case "heartbeat":
            return None
        case kind:
            raise Mismatch(f"unexpected message on the link: {kind}")


def _read_ticket(ticket: pb.Ticket, form: pb.ModelFormat, pool: PoolOffer) -> kv.Ticket:
    pages = tuple(ticket.pages)
    if ticket.pool != pool.pool:
        raise Mismatch(f"ticket: pool {ticket.pool:016x} was not offered")
    if len(set(pages)) != len(pages) or any(not 0 < page < pool.pages for page in pages):
        raise Mismatch(f"ticket: pages must be distinct and within 1..{pool.pages - 1}")
    if ticket.first_position % form.page_size:
        raise Mismatch(f"ticket: first_position {ticket.first_position} is not a multiple of {form.page_size}")
    heads = (ticket.rank, ticket.first_kv_head, ticket.num_kv_heads)
    if heads != (form.rank, form.first_kv_head, form.num_kv_heads):
        raise Mismatch(f"ticket: rank and KV heads {heads} are not this worker's")
    valid_s = min(ticket.valid_ms / 1000, MAX_VALID_S)
    return kv.Ticket(_number(ticket.ticket), read_key(ticket.key), ticket.pool, pages, ticket.first_position, valid_s)


def _number(ticket: int) -> int:
    if ticket == 0:
        raise Mismatch("tickets count from 1")
    return ticket


def from_writer(message: kv.FromWriter) -> pb.FromPrefill:
    """What a prefill worker says."""
    match message:
        case kv.Progress(entries=entries):
            tickets, layers, pages = zip(*entries, strict=True) if entries else ((), (), ())
            return pb.FromPrefill(progress=pb.Progress(tickets=tickets, layers=layers, pages=pages))
        case kv.Complete():
            tokens = [_write_first(token) for token in message.first_tokens]
            complete = pb.Complete(
                ticket=message.ticket, first_tokens=tokens, digests=message.digests, round=message.round
            )
            return pb.FromPrefill(complete=complete)
        case kv.Drained():
            return pb.FromPrefill(drained=pb.Drained(ticket=message.ticket, reason=message.reason))


def read_from_writer(message: pb.FromPrefill) -> kv.FromWriter | None:
    """What a prefill worker said; None for a heartbeat."""
    match message.WhichOneof("kind"):
        case "progress":
            progress = message.progress
            if not len(progress.tickets) == len(progress.layers) == len(progress.pages):
                raise Mismatch("progress: arrays of unequal length")
            return kv.Progress(tuple(zip(progress.tickets, progress.layers, progress.pages, strict=True)))
        case "complete":
            return _read_complete(message.complete)
        case "drained":
            return kv.Drained(_number(message.drained.ticket), message.drained.reason)
        case "heartbeat":
            return None
        case kind:
            raise Mismatch(f"unexpected message on the link: {kind}")


def _write_first(token: kv.FirstToken) -> pb.FirstToken:
    return pb.FirstToken(
        sample=token.sample,
        token_id=token.token_id,
        finish=token.finish,
        logprob_ids=[entry[0] for entry in token.logprobs],
        logprob_values=[entry[1] for entry in token.logprobs],
        queue_us=microseconds(token.queue),
        prefill_us=microseconds(token.prefill),
        cached_tokens=token.cached_tokens,
    )


def _read_complete(complete: pb.Complete) -> kv.Complete:
    if len(complete.digests) % DIGEST_BYTES:
        raise Mismatch(f"complete: {len(complete.digests)} bytes of digests")
    if not 0 < len(complete.first_tokens) <= MAX_SAMPLES:
        raise Mismatch(f"complete: {len(complete.first_tokens)} first tokens")
    tokens = tuple(_read_first(token) for token in complete.first_tokens)
    return kv.Complete(_number(complete.ticket), tokens, complete.digests, complete.round)


def _read_first(token: pb.FirstToken) -> kv.FirstToken:
    if token.finish not in (0, *FinishReason):
        raise Mismatch(f"complete: finish {token.finish}")
    if len(token.logprob_ids) != len(token.logprob_values) or len(token.logprob_ids) > MAX_LOGPROBS:
        raise Mismatch("complete: malformed log-probabilities")
    logprobs = tuple(zip(token.logprob_ids, token.logprob_values, strict=True))
    return kv.FirstToken(
        sample=token.sample,
        token_id=token.token_id,
        finish=token.finish,
        logprobs=logprobs,
        queue=token.queue_us / 1e6,
        prefill=token.prefill_us / 1e6,
        cached_tokens=token.cached_tokens,
    )
