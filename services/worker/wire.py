"""Session messages of the worker API <-> the engine's data. Protobuf stops here."""

from collections.abc import Iterable, Mapping, Sequence

from ...engine import request as engine
from ...engine.request import (
    Constraint,
    ConstraintKind,
    Request,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    Work,
)
from ...engine.validate import MAX_SAMPLES
from ...errors import DeadlineExceeded, HandoverExpired, InvalidRequest, TwostrokeError, Unavailable
from ...v1 import worker_pb2 as pb
from ..durations import microseconds
from ..handover.handover import PairSpeed, PeerAddress

MAX_SALT_BYTES = 64
MAX_ADDRESS = 256
MAX_MESSAGE = 1000  # characters of a failure's text
MAX_FIELD = 100  # characters of the name of its field
ROLES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode", pb.ROLE_BOTH: "both"}


def key_of(gateway: int, message: pb.Submit | pb.Failure) -> SequenceKey:
    """The sequence that a message of `gateway` speaks of."""
    return SequenceKey(gateway, message.request, message.sample, message.attempt)


def read_submit(gateway: int, submit: pb.Submit, now: float) -> tuple[Request, PeerAddress | None]:
    """A sequence to run and the worker that shares it. `now`: time.monotonic(). InvalidRequest names the field.

    Checks what only the wire can get wrong; values (ranges, lengths, the vocabulary) are checked by `EngineCore.add`.
    """
    try:
        work = Work(submit.work)
    except ValueError:
        raise InvalidRequest(f"work {submit.work} is unknown", field="work") from None
    if not submit.HasField("params"):
        raise InvalidRequest("params are missing", field="params")
    if submit.first_index != len(submit.output_ids):
        raise InvalidRequest(
            f"first_index is {submit.first_index}, output_ids are {len(submit.output_ids)}", field="first_index"
        )
    if len(submit.cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(
            f"cache_salt has {len(submit.cache_salt)} bytes, over {MAX_SALT_BYTES}", field="cache_salt"
        )
    samples = submit.samples or 1
    if samples > MAX_SAMPLES or submit.sample + samples > 1 << 32:
        raise InvalidRequest(f"{samples} samples from {submit.sample} on, at most {MAX_SAMPLES}", field="samples")
    peer = None if work is Work.ALL else read_peer(submit.peer)
    request = Request(
        key=key_of(gateway, submit),
        prompt_ids=list(submit.prompt_ids),
        params=read_params(submit.params),
        work=work,
        output_ids=list(submit.output_ids),
        arrival=now,
        deadline=now + submit.timeout_ms / 1000 if submit.timeout_ms else None,
        cache_salt=submit.cache_salt,
        start_now=submit.start_now,
        writer=peer.incarnation if peer is not None and work is Work.DECODE else 0,
        samples=samples,
        priority=submit.priority,
    )
    return request, peer


def read_peer(peer: pb.Peer) -> PeerAddress:
    """InvalidRequest where the address or the incarnation is missing."""
    if not peer.incarnation:
        raise InvalidRequest("the peer's incarnation is missing", field="peer.incarnation")
    if not 0 < len(peer.address) <= MAX_ADDRESS:
        raise InvalidRequest("the peer's address is missing or too long", field="peer.address")
    return PeerAddress(peer.address, peer.incarnation)


def read_peers(peers: pb.Peers) -> list[PeerAddress]:
    """The usable ones: a list of hints, so that a bad entry costs nobody anything."""
    return [PeerAddress(peer.address, peer.incarnation) for peer in peers.peers if peer.address and peer.incarnation]


def read_params(params: pb.SamplingParams) -> SamplingParams:
    """Taken as they are; InvalidRequest where arrays contradict each other."""
    if len(params.bias_ids) != len(params.bias_values):
        raise InvalidRequest("bias_ids and bias_values differ in length", field="logit_bias")
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        min_p=params.min_p,
        typical_p=params.typical_p or 1.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(zip(params.bias_ids, params.bias_values, strict=True)),
        allowed_token_ids=tuple(params.allowed_ids),
        banned_token_ids=tuple(params.banned_ids),
        bad_words=tuple(tuple(word.ids) for word in params.bad_words),
        min_tokens=params.min_tokens,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        constraint=read_constraint(params.constraint) if params.HasField("constraint") else None,
    )


def read_constraint(constraint: pb.OutputConstraint) -> Constraint:
    """InvalidRequest where its kind is unknown here."""
    try:
        return Constraint(ConstraintKind(constraint.kind), constraint.text)
    except ValueError:
        raise InvalidRequest(f"constraint kind {constraint.kind} is unknown", field="constraint") from None


def by_gateway(outputs: Iterable[SequenceOutput]) -> Mapping[int, Sequence[SequenceOutput]]:
    """A step's outputs, in their order, for each gateway."""
    groups: dict[int, list[SequenceOutput]] = {}
    for output in outputs:
        groups.setdefault(output.key.gateway, []).append(output)
    return groups


def pack_step(step: int, outputs: Sequence[SequenceOutput]) -> pb.FromWorker:
    """All that one step made for one gateway, as one message of flat arrays."""
    tokens = [token for output in outputs for token in output.tokens]
    logprobs = [entry for token in tokens for entry in token.logprobs]
    message = pb.FromWorker()
    packed = message.step
    packed.step = step
    packed.requests.extend([output.key.request for output in outputs])
    packed.samples.extend([output.key.sample for output in outputs])
    packed.attempts.extend([output.key.attempt for output in outputs])
    packed.first_indices.extend([output.first_index for output in outputs])
    packed.counts.extend([len(output.tokens) for output in outputs])
    packed.finishes.extend([output.finish or 0 for output in outputs])
    packed.token_ids.extend([token.token_id for token in tokens])
    if logprobs:
        packed.logprob_counts.extend([len(token.logprobs) for token in tokens])
        packed.logprob_ids.extend([token_id for token_id, _ in logprobs])
        packed.logprob_values.extend([value for _, value in logprobs])
    for index, output in enumerate(outputs):
        if output.timings is not None:
            packed.timings.append(pack_timings(index, output.timings))
        if (told := output.prompt_logprobs) is not None:
            packed.prompt_logprobs.add(
                sequence=index,
                first_position=told.first_position,
                counts=told.counts,
                ids=told.ids,
                values=told.values,
            )
    return message


def pack_timings(index: int, timings: engine.SequenceTimings) -> pb.SequenceTimings:
    """Seconds become microseconds."""
    return pb.SequenceTimings(
        sequence=index,
        queue_us=microseconds(timings.queue),
        prefill_us=microseconds(timings.prefill),
        transfer_us=microseconds(timings.transfer),
        cached_tokens=timings.cached_tokens,
    )


def pack_pair(reader: int, pair: PairSpeed) -> pb.PairRate:
    """`reader`: incarnation of the decode worker."""
    return pb.PairRate(reader=reader, gb_per_s=pair.gb_per_s, transport=pair.transport)


def pack_failure(key: SequenceKey, error: Exception) -> pb.FromWorker:
    """Why a sequence ended without an answer; a fault of ours keeps its details to our log."""
    match error:
        case InvalidRequest():
            code = pb.FAILURE_CODE_INVALID
        case DeadlineExceeded():
            code = pb.FAILURE_CODE_DEADLINE
        case HandoverExpired():
            code = pb.FAILURE_CODE_WRITER_LOST
        case Unavailable():
            code = pb.FAILURE_CODE_DRAINING
        case _:
            code = pb.FAILURE_CODE_INTERNAL
    text = str(error) if isinstance(error, TwostrokeError) else f"internal error ({type(error).__name__})"
    failure = pb.Failure(
        request=key.request,
        sample=key.sample,
        attempt=key.attempt,
        code=code,
        message=text[:MAX_MESSAGE],
        field=(error.field or "")[:MAX_FIELD] if isinstance(error, InvalidRequest) else "",
    )
    return pb.FromWorker(failure=failure)
