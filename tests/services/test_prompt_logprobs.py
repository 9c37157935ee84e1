"""Log-probabilities of a prompt at the gateway: whole and in the first message, whoever is slow, repeats or dies."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from twostroke.engine.request import PromptLogprobs, SequenceKey, SequenceOutput
from twostroke.services.gateway.prompt_scores import PromptScores
from twostroke.services.worker.wire import pack_step
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import worker_pb2 as wpb

from .cluster import cluster, field_of, refusal, text_request, token_ids, until
from .stand_in_worker import EOS, Script, StandIn

ANSWER = [*range(10, 40), EOS]
PROMPT = "hello"  # five tokens


def stretch(first: int, count: int, top: int = 1) -> PromptLogprobs:
    """Of each position p: the token 100 + p at -p, then top ones at -p / 2."""
    ids: list[int] = []
    values: list[float] = []
    for position in range(first, first + count):
        ids += [100 + position, *range(top)]
        values += [-float(position), *[-position / 2] * top]
    return PromptLogprobs(first, [1 + top] * count, ids, values)


class Telling(StandIn):
    """Tells (first, count) stretches of the prompt before what its script says."""

    def __init__(self, role: str, name: str, *stretches: tuple[int, int], before_s: float = 0.0, **script: Any) -> None:
        super().__init__(role, name, Script(**script))
        self.stretches, self.before_s = stretches, before_s

    async def _play(self, gateway: int, submit: wpb.Submit, sample: int, outbox: asyncio.Queue[Any]) -> None:
        key = SequenceKey(gateway, submit.request, sample, submit.attempt)
        if submit.params.HasField("prompt_logprobs") and submit.work != wpb.WORK_DECODE:
            for first, count in self.stretches:
                await asyncio.sleep(self.before_s)
                told = stretch(first, count, submit.params.prompt_logprobs)
                output = SequenceOutput(key, submit.first_index, [], None, None, told)
                outbox.put_nowait(pack_step(0, [output]))
        await super()._play(gateway, submit, sample, outbox)


def check(pieces: list[pb.GenerateResponse], top: int = 1, tokens: int = 5) -> None:
    """The first message, and only that, has them all."""
    assert [len(piece.prompt_logprobs) for piece in pieces] == [tokens - 1] + [0] * (len(pieces) - 1)
    for position, entry in enumerate(pieces[0].prompt_logprobs, 1):
        assert (entry.token_id, entry.logprob) == (100 + position, -position)
        assert [(other.token_id, other.logprob) for other in entry.top] == [(i, -position / 2) for i in range(top)]


@pytest.mark.parametrize("stretches", [[(1, 4)], [(1, 2), (3, 2)], [(1, 1), (1, 3), (2, 3)], [(3, 2), (1, 4)]])
async def test_the_first_message_has_them_all(tiny_llama_dir: Path, stretches: list[tuple[int, int]]) -> None:
    """In stretches, repeated ones, and one that comes before its turn and again."""
    async with cluster(tiny_llama_dir, Telling("prefill", "p0", *stretches), StandIn("decode", "d0")) as it:
        pieces = await it.collect(text_request(PROMPT, prompt_logprobs=2))
        assert token_ids(pieces) == ANSWER
        check(pieces, top=2)
        one, two = it.worker("p0").submits[0], it.worker("d0").submits[0]
        assert one.params == two.params
        assert one.params.prompt_logprobs == 2
        await it.idle()


async def test_what_is_cached_does_not_count(tiny_llama_dir: Path) -> None:
    """A prompt that the decode worker is known to hold goes to the prefill worker again: it has to be computed."""
    text = "x" * 64
    workers = Telling("prefill", "p0", (1, 63)), StandIn("decode", "d0")
    async with cluster(tiny_llama_dir, *workers) as it:
        for top in (None, 1, 1):
            request = text_request(text, prompt_logprobs=top)
            pieces = await it.collect(request)
            assert token_ids(pieces) == ANSWER
        check(pieces, tokens=64)
        assert len(it.worker("p0").submits) == 3


async def test_they_are_waited_for_though_the_decode_worker_is_done(tiny_llama_dir: Path) -> None:
    """All tokens come from D, at once; P tells later."""
    workers = Telling("prefill", "p0", (1, 4), before_s=0.3, first_tokens=False), StandIn("decode", "d0")
    async with cluster(tiny_llama_dir, *workers) as it:
        pieces = await it.collect(text_request(PROMPT, prompt_logprobs=1))
        assert token_ids(pieces) == ANSWER
        check(pieces)
        await it.idle()


@pytest.mark.parametrize("role", ["decode", "both"])
async def test_one_worker_alone(tiny_llama_dir: Path, role: str) -> None:
    async with cluster(tiny_llama_dir, Telling(role, "w0", (1, 4))) as it:
        pieces = await it.collect(text_request(PROMPT, max_tokens=1, prompt_logprobs=0))
        assert token_ids(pieces) == ANSWER[:1]
        check(pieces, top=0)


async def test_a_prompt_of_one_token_has_none(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, Telling("prefill", "p0"), StandIn("decode", "d0")) as it:
        request = text_request(prompt_logprobs=3)
        request.input.token_ids.ids.append(7)
        pieces = await it.collect(request)
        assert token_ids(pieces) == ANSWER
        check(pieces, tokens=1)


async def test_none_where_none_were_asked_for(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, Telling("prefill", "p0", (1, 4)), StandIn("decode", "d0")) as it:
        pieces = await it.collect(text_request(PROMPT))
        assert token_ids(pieces) == ANSWER
        assert not any(piece.prompt_logprobs for piece in pieces)


async def test_a_prefill_worker_that_dies_half_way_is_replayed(tiny_llama_dir: Path) -> None:
    """The decode worker goes on, but cannot tell what the client waits for; with all to do, it does."""
    first = Telling("prefill", "p0", (1, 2), first_tokens=False)
    async with cluster(tiny_llama_dir, first, Telling("decode", "d0", (1, 4)), replay_wait_s=10) as it:
        call = it.stub.Generate(text_request(PROMPT, prompt_logprobs=1))
        await until(lambda: first.submits)
        await asyncio.sleep(0.1)
        await first.stop()
        pieces = [piece async for piece in call]
        assert token_ids(pieces) == ANSWER
        check(pieces)
        assert pieces[-1].finish.replays >= 1
        await it.idle()


class Late(Telling):
    """The stretches are those of the attempt: the last attempt has all."""

    async def _play(self, gateway: int, submit: wpb.Submit, sample: int, outbox: asyncio.Queue[Any]) -> None:
        self.stretches = ((1, 4),) if submit.attempt else ((1, 2),)
        await super()._play(gateway, submit, sample, outbox)


async def test_a_failure_half_way_is_replayed_without_doubles(tiny_llama_dir: Path) -> None:
    failing = Late("both", "b0", mute_after=0, fail=(wpb.FAILURE_CODE_INTERNAL, "oops"), fail_attempts=1)
    async with cluster(tiny_llama_dir, failing) as it:
        pieces = await it.collect(text_request(PROMPT, prompt_logprobs=1))
        assert token_ids(pieces) == ANSWER
        check(pieces)
        assert [submit.params.HasField("prompt_logprobs") for submit in failing.submits] == [True, True]


async def test_a_replay_after_the_first_message_asks_for_none(tiny_llama_dir: Path) -> None:
    failing = Late("both", "b0", mute_after=5, fail=(wpb.FAILURE_CODE_INTERNAL, "oops"), fail_attempts=1)
    failing.stretches = ((1, 4),)
    async with cluster(tiny_llama_dir, failing) as it:
        failing._play = Telling._play.__get__(failing)  # type: ignore[method-assign]
        pieces = await it.collect(text_request(PROMPT, prompt_logprobs=1))
        assert token_ids(pieces) == ANSWER
        check(pieces)
        assert [submit.params.HasField("prompt_logprobs") for submit in failing.submits] == [True, False]


async def test_a_worker_that_does_not_tell_them_is_at_fault(tiny_llama_dir: Path) -> None:
    async with cluster(tiny_llama_dir, Telling("both", "b0", (1, 3)), max_attempts=2) as it:
        error = await refusal(it.collect(text_request(PROMPT, prompt_logprobs=1)))
        assert error.code() == grpc.StatusCode.INTERNAL
        await it.idle()


async def test_more_than_a_message_holds_is_refused(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.services.gateway.parameters.MAX_PROMPT_ENTRIES", 5 * 21 - 1)
    async with cluster(tiny_llama_dir, Telling("both", "b0", (1, 4))) as it:
        error = await refusal(it.collect(text_request(PROMPT, prompt_logprobs=20)))
        assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt_logprobs")
        check(await it.collect(text_request(PROMPT, prompt_logprobs=19)), top=19)


def test_scores_join_stretches() -> None:
    scores = PromptScores(8)
    assert not scores.complete
    for first, count in [(3, 2), (1, 3), (1, 2), (2, 4), (9, 1), (6, 9)]:
        scores.add(stretch(first, count))
    assert scores.complete
    whole = scores.take()
    assert whole is not None
    expected = stretch(1, 7)
    assert (whole.first_position, list(whole.counts), list(whole.ids)) == (1, expected.counts, expected.ids)
    assert list(whole.values) == expected.values
    assert scores.take() is None


def test_scores_that_nobody_wants() -> None:
    scores = PromptScores(None)
    scores.add(stretch(1, 5))
    assert scores.complete
    assert scores.take() is None
