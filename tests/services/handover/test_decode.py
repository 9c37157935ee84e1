"""The decode side alone, event by event: what it asks of engine and links, and when pages come back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.request import FinishReason, Request, SamplingParams, SequenceKey, StepResult, Work
from twostroke.errors import HandoverExpired, InvalidRequest
from twostroke.kernels.digest import fold_layers, pool_digests
from twostroke.kvtransfer import messages as kv
from twostroke.kvtransfer.pool_pages import pool_bytes
from twostroke.services.handover.decode import DecodeHandover
from twostroke.services.handover.handover import PeerAddress

from ..handover_rig import LAYERS, PAGE, VOCAB, TensorRunner, expected_tokens, random_prompt

WRITER = 8
POOL = 5
PAGES = 33
PEER = PeerAddress("p:1", WRITER)


class Links:
    """Collects what is sent and wanted."""

    def __init__(self) -> None:
        self.sent: list[kv.FromReader] = []
        self.wanted: list[PeerAddress] = []
        self.looked = 0
        self.paused = False

    def attach(self, events: Any) -> None:
        self.events = events

    def want(self, peers: Iterable[PeerAddress]) -> None:
        self.wanted += peers

    def send(self, batches: Mapping[int, Sequence[kv.FromReader]]) -> None:
        assert set(batches) == {WRITER}
        self.sent += batches[WRITER]

    def lane(self, writer: int) -> Any:
        return self if writer == WRITER else None

    def pause(self, until: float) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def look(self) -> None:
        self.looked += 1


class Side:
    """Engine and hand-over on this thread, and what a prefill worker would do."""

    def __init__(self) -> None:
        self.pool = torch.zeros((LAYERS, PAGES, 2, 1, PAGE, 2), dtype=torch.int32)
        self.runner = TensorRunner(self.pool)
        self.core = EngineCore(
            self.runner,
            EngineOptions(page_size=PAGE, watermark=0.0, reserve="prompt"),
            pages=PAGES,
            context_length=512,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            cache_root=b"",
        )
        self.links = Links()
        self.now = 100.0
        self.rehearsed = 0
        self.handover = DecodeHandover(
            self.core, self.links, self.pool, pool_id=POOL, rehearse=self.rehearse, clock=lambda: self.now
        )
        self.emitted = StepResult()
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.handover.attach(self.now_, self.emit)
        self.numbers = 0

    def now_(self, event: Callable[[], None]) -> None:
        """Posted events run at once."""
        event()

    def rehearse(self) -> None:
        self.rehearsed += 1

    def emit(self, result: StepResult) -> None:
        self.emitted.failures += result.failures
        self.collect(result)

    def collect(self, result: StepResult) -> None:
        for output in result.outputs:
            self.emitted.outputs.append(output)
            self.tokens.setdefault(output.key, []).extend(token.token_id for token in output.tokens)

    def submit(self, prompt: list[int], peer: PeerAddress | None = PEER, **params: Any) -> SequenceKey:
        self.numbers += 1
        key = SequenceKey(1, self.numbers, 0, 0)
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params})
        request = Request(key, prompt, sampling, Work.DECODE, writer=peer.incarnation if peer else 0)
        self.core.add(request)
        self.handover.submitted(request, peer)
        return key

    def step(self) -> None:
        result = self.core.step(self.handover.hook, self.handover.wait)
        self.handover.stepped(result)
        self.collect(result)

    def ticket(self) -> kv.Ticket:
        """The latest."""
        return [message for message in self.links.sent if isinstance(message, kv.Ticket)][-1]

    def sent(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.links.sent if type(message) is kind]

    def write(self, ticket: kv.Ticket, prompt: list[int]) -> bytes:
        """Fills the ticket's pages; returns the digests."""
        for at in range(ticket.first_position, len(prompt)):
            page = ticket.pages[(at - ticket.first_position) // PAGE]
            for layer in range(LAYERS):
                self.pool[layer, page, 0, 0, at % PAGE, 0] = prompt[at] + VOCAB * layer
                self.pool[layer, page, 1, 0, at % PAGE, 1] = at
        layers = pool_digests(pool_bytes(self.pool), ticket.pages, ticket=ticket.ticket, first_layer=0, ordinal=0)
        return fold_layers(layers, len(ticket.pages))

    def complete(self, ticket: kv.Ticket, digests: bytes, token: int, finish: int = 0) -> None:
        first = kv.FirstToken(0, token, finish, ((token, -0.5),))
        self.handover.received(WRITER, kv.Complete(ticket.ticket, (first,), digests))

    def over(self) -> None:
        """Nothing is left."""
        self.core.check_integrity(idle=True)
        self.handover.reader.check(idle=True)
        self.handover.check(idle=True)

    def why(self, key: SequenceKey) -> str:
        """Its one failure."""
        (error,) = [error for failed, error in self.emitted.failures if failed == key]
        assert isinstance(error, HandoverExpired)
        return error.message


@pytest.fixture
def side() -> Side:
    return Side()


def test_kv_comes_and_decoding_goes_on(side: Side) -> None:
    side.handover.writer_up(WRITER)
    prompt = random_prompt(1, 10)
    key = side.submit(prompt)
    assert side.links.wanted == []
    side.step()
    ticket = side.ticket()
    assert ticket.key == key
    assert ticket.pool == POOL
    assert len(ticket.pages) == 3
    assert side.core.load().held_pages == 3
    digests = side.write(ticket, prompt)
    side.handover.received(WRITER, kv.Progress(((1, LAYERS, 2),)))
    side.complete(ticket, digests, expected_tokens(prompt, 1)[0])
    assert side.sent(kv.Accepted) == [kv.Accepted(1)]
    assert side.core.load().held_pages == 0
    (first,) = side.emitted.outputs
    assert first.tokens[0].logprobs == ((first.tokens[0].token_id, -0.5),)
    for _ in range(3):
        side.step()
    assert side.tokens[key] == expected_tokens(prompt, 4)
    side.over()


def test_no_ticket_before_a_link_ever_stood(side: Side) -> None:
    key = side.submit([1, 2, 3])
    assert side.links.wanted == [PEER]
    side.step()
    assert side.links.sent == []
    assert side.core.load().held_pages == 0
    side.handover.writer_up(WRITER)
    assert side.ticket().key == key
    assert side.core.load().held_pages == 1
    side.handover.writer_dead(WRITER)
    assert side.why(key) == "the prefill worker is gone"
    side.over()


def test_one_cancelled_meanwhile_gets_no_ticket(side: Side) -> None:
    key = side.submit([1, 2, 3])
    side.step()
    side.core.cancel(key)
    side.handover.gone(key)
    side.handover.writer_up(WRITER)
    assert side.links.sent == []
    side.over()


def test_with_a_broken_link_tickets_wait(side: Side) -> None:
    side.handover.writer_up(WRITER)
    side.handover.writer_down(WRITER)
    side.submit([1, 2, 3])
    side.step()
    assert side.links.sent == []
    assert side.core.load().held_pages == 1
    side.handover.writer_up(WRITER)
    assert side.ticket().ticket == 1


@pytest.mark.parametrize("final", [True, False])
def test_a_writer_that_refuses(side: Side, final: bool) -> None:
    waiting, reserved = side.submit(random_prompt(2, 100)), side.submit(random_prompt(3, 100))
    side.step()  # the second does not fit beside the first
    side.handover.writer_refused(WRITER, "layers: 2 here, 3 there", final)
    assert side.why(waiting) == side.why(reserved) == "layers: 2 here, 3 there"
    side.over()
    later = side.submit([1])
    if final:
        assert side.why(later) == "layers: 2 here, 3 there"
        side.over()
    else:
        assert side.links.wanted[-1] == PEER
        assert len(side.emitted.failures) == 2


def test_a_writer_that_was_replaced_keeps_its_pages_in_quarantine(side: Side) -> None:
    side.handover.writer_up(WRITER)
    key = side.submit([1, 2, 3, 4, 5])
    side.step()
    side.handover.writer_down(WRITER)
    side.handover.writer_replaced(WRITER, "another incarnation")
    assert side.why(key) == "another incarnation"
    assert side.core.pool.quarantined == 2
    assert side.why(side.submit([1])) == "another incarnation"
    side.handover.writer_dead(WRITER)
    side.over()


def test_pages_of_a_cancelled_sequence_come_back_when_the_writer_is_done(side: Side) -> None:
    side.handover.writer_up(WRITER)
    key = side.submit([1, 2, 3, 4, 5])
    side.step()
    side.core.cancel(key)
    side.handover.gone(key)
    side.handover.gone(key)
    assert side.core.pool.quarantined == 2
    assert side.sent(kv.Revoke) == [kv.Revoke(1)]
    side.handover.received(WRITER, kv.Drained(1))
    assert side.emitted.failures == []
    side.over()


def test_the_writers_own_end_of_a_ticket_is_a_loss(side: Side) -> None:
    side.handover.writer_up(WRITER)
    key = side.submit([1, 2, 3, 4, 5])
    side.step()
    side.handover.received(WRITER, kv.Drained(1, "the request is gone"))
    assert "the request is gone" in side.why(key)
    side.over()


def test_an_expired_ticket_is_revoked(side: Side) -> None:
    side.handover.writer_up(WRITER)
    key = side.submit([1, 2, 3, 4, 5])
    side.step()
    side.now += 61.0
    side.handover.tick(side.now)
    assert "in time" in side.why(key)
    assert side.sent(kv.Revoke) == [kv.Revoke(1)]
    assert side.core.pool.quarantined == 2
    side.handover.received(WRITER, kv.Drained(1))
    side.over()


def test_an_engine_with_nothing_to_do_rehearses_while_kv_comes(side: Side) -> None:
    side.handover.writer_up(WRITER)
    prompts = [random_prompt(seed, 8) for seed in (4, 5)]
    for prompt in prompts:
        side.submit(prompt)
    side.step()
    tickets = side.sent(kv.Ticket)
    digests = [side.write(ticket, prompt) for ticket, prompt in zip(tickets, prompts, strict=True)]
    side.handover.received(WRITER, kv.Progress(((tickets[0].ticket, 1, 2),)))
    assert side.rehearsed == 1
    side.complete(tickets[0], digests[0], expected_tokens(prompts[0], 1)[0])
    side.handover.received(WRITER, kv.Progress(((tickets[1].ticket, 1, 2),)))
    assert side.rehearsed == 1, "it has a step to run"
    side.complete(tickets[1], digests[1], expected_tokens(prompts[1], 1)[0])
    for _ in range(8):
        side.step()
    assert sorted(side.tokens.values()) == sorted(expected_tokens(prompt, 4) for prompt in prompts)
    side.over()


@pytest.mark.parametrize("end", ["a step follows", "token 0 is the last", "cancelled", "lost", "another request"])
def test_an_engine_on_a_gpu_does_not_sleep_before_the_last_layers_come(side: Side, end: str) -> None:
    """And whatever follows, somebody looks for what writers say."""
    side.handover._rehearsal._eager = True
    side.handover.writer_up(WRITER)
    key = side.submit(prompt := random_prompt(4, 8))
    side.step()
    ticket = side.ticket()
    digests = side.write(ticket, prompt)
    assert side.handover.awake_until == 0.0
    side.handover.received(WRITER, kv.Progress(((ticket.ticket, LAYERS, 2), (99, LAYERS, 9))))
    assert side.handover.awake_until > side.now
    assert side.links.paused
    side.handover.look()
    assert (side.links.looked, side.rehearsed) == (1, 0), "the rest comes any moment"
    token = expected_tokens(prompt, 1)[0]
    match end:
        case "a step follows":
            side.complete(ticket, digests, token)
            assert side.handover.awake_until == 0.0
            assert side.links.paused, "until the step is launched"
            side.step()
        case "token 0 is the last":
            side.complete(ticket, digests, token, finish=int(FinishReason.STOP))
        case "cancelled":
            side.core.cancel(key)
            side.handover.gone(key)
            side.handover.received(WRITER, kv.Drained(ticket.ticket))
        case "lost":
            side.handover.writer_dead(WRITER)
            side.handover.gone(key)
        case "another request":
            side.submit(random_prompt(5, 8))
            side.step()
            side.complete(ticket, digests, token)
    assert side.handover.awake_until == 0.0
    assert not side.links.paused


def test_what_the_reader_says_waits_for_the_launch(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for `Accepted` waits for pages only; a loop at work would hold the launch up."""
    monkeypatch.setattr(side.runner, "overlaps", True, raising=False)
    side.handover.writer_up(WRITER)
    side.submit(prompt := random_prompt(4, 8))
    side.step()
    ticket = side.ticket()
    side.complete(ticket, side.write(ticket, prompt), expected_tokens(prompt, 1)[0])
    assert side.core.launches_only()
    assert side.sent(kv.Accepted) == []
    side.step()
    assert side.sent(kv.Accepted) == [kv.Accepted(1)]
    side.submit(random_prompt(5, 8))  # a step is on its way
    side.handover.writer_down(WRITER)
    while side.core.has_work():
        side.step()


def test_what_waits_for_a_launch_that_never_comes_is_sent(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV arrives and its sequence is dropped, both before the next step."""
    monkeypatch.setattr(side.runner, "overlaps", True, raising=False)
    side.handover.writer_up(WRITER)
    key = side.submit(prompt := random_prompt(4, 8))
    side.step()
    ticket = side.ticket()
    side.complete(ticket, side.write(ticket, prompt), expected_tokens(prompt, 1)[0])
    assert side.sent(kv.Accepted) == []
    side.core.cancel(key)
    side.handover.gone(key)
    assert side.sent(kv.Accepted) == [kv.Accepted(1)]
    side.over()


def test_a_fault_of_ours_as_kv_arrives_leaves_no_page_held(
    side: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(side.core._postprocessor, "arrive", fails)
    side.handover.writer_up(WRITER)
    key = side.submit(prompt := random_prompt(4, 8))
    side.step()
    ticket = side.ticket()
    side.complete(ticket, side.write(ticket, prompt), expected_tokens(prompt, 1)[0])
    assert "could not be taken" in side.why(key)
    assert "ZeroDivisionError" in caplog.text
    side.over()


def test_wrong_digests_are_asked_for_again(side: Side) -> None:
    side.handover.writer_up(WRITER)
    prompt = random_prompt(4, 8)
    key = side.submit(prompt)
    side.step()
    ticket = side.ticket()
    digests = side.write(ticket, prompt)
    side.pool[1, ticket.pages[1], 1, 0, 3, 1] ^= 1 << 30
    (token,) = expected_tokens(prompt, 1)
    side.complete(ticket, digests, token)
    (resend,) = side.sent(kv.Resend)
    assert resend.ordinals == (1,)
    assert key not in side.tokens
    side.write(ticket, prompt)
    first = (kv.FirstToken(0, token, 0),)
    side.handover.received(WRITER, kv.Complete(1, first, digests, resend.round + 1))
    assert side.tokens[key] == [token]
    side.core.cancel(key)
    side.handover.gone(key)
    side.over()


def test_a_finish_with_token_0_caches_nothing(side: Side) -> None:
    side.handover.writer_up(WRITER)
    prompt = random_prompt(5, 8)
    key = side.submit(prompt)
    side.step()
    side.complete(side.ticket(), b"", 7, finish=1)
    (output,) = side.emitted.outputs
    assert (output.key, output.first_index, output.finish) == (key, 0, FinishReason.STOP)
    assert side.core.pool.cached == 0
    side.over()


@pytest.mark.parametrize(("sample", "token"), [(1, 7), (0, VOCAB)])
def test_a_token_0_that_cannot_be(side: Side, sample: int, token: int) -> None:
    side.handover.writer_up(WRITER)
    prompt = random_prompt(6, 8)
    key = side.submit(prompt)
    side.step()
    digests = side.write(side.ticket(), prompt)
    side.handover.received(WRITER, kv.Complete(1, (kv.FirstToken(sample, token, 0),), digests))
    assert "token 0" in side.why(key)
    side.over()


def test_requests_without_a_writer_are_refused(side: Side) -> None:
    key = side.submit([1, 2, 3], None)
    ((failed, error),) = side.emitted.failures
    assert failed == key
    assert isinstance(error, InvalidRequest)
    side.over()


def test_whole_requests_are_none_of_its_business(side: Side) -> None:
    request = Request(SequenceKey(1, 1, 0, 0), [1], SamplingParams(max_tokens=1), Work.ALL)
    side.core.add(request)
    side.handover.submitted(request, None)
    side.step()
    side.handover.gone(request.key)
    assert side.links.sent == []
    side.over()
