"""Pieces of answers as messages: log-probabilities of prompts, ends that are owed, sizes."""

import pytest

from twostroke.engine.request import FinishReason, PromptLogprobs
from twostroke.errors import InvalidRequest
from twostroke.services.gateway.generation import Finish, Piece, Timings
from twostroke.services.gateway.vllm_engine.logprobs import input_logprobs
from twostroke.services.gateway.vllm_engine.reply import ENTRY_BYTES, Reply, StreamReply, Wanted, WholeReply
from twostroke.smg import vllm_engine_pb2 as pb

PROMPT = [5, 6, 7]
SCORES = PromptLogprobs(1, [2, 3], [6, 9, 7, 8, 9], [-0.5, -0.25, -1.0, -0.125, -0.75])


def wanted(n: int = 1) -> Wanted:
    return Wanted(PROMPT, pb.SamplingParams(n=n, prompt_logprobs=2, logprobs=1, stop_token_ids=[4]))


def piece(ids: list[int], *, sample: int = 0, end: FinishReason | None = None, scores: bool = False) -> Piece:
    finish = Finish(end, "", 3, 1, len(ids), Timings(), 0, "p", "d") if end is not None else None
    logprobs = [((id_, -1.0), (9, -2.0)) for id_ in ids]
    return Piece(0, ids, "", logprobs, finish, sample, SCORES if scores else None, cached_tokens=1)


def take(reply: Reply, given: Piece) -> list[pb.GenerateResponse]:
    scores = input_logprobs(PROMPT, SCORES, top=True) if given.prompt_logprobs is not None else None
    told = reply.messages(given, scores)
    reply.sent(given)
    return told


def test_of_a_prompt_s_first_token_nothing_is_told() -> None:
    told = input_logprobs(PROMPT, SCORES, top=True)
    assert list(told.token_ids) == PROMPT
    assert [each.HasField("value") for each in told.token_logprobs] == [False, True, True]
    assert [each.value for each in told.token_logprobs[1:]] == [-0.5, -1.0]
    assert [list(each.token_ids) for each in told.top_logprobs] == [[], [9], [8, 9]]
    assert [list(each.values) for each in told.top_logprobs] == [[], [-0.25], [-0.125, -0.75]]
    assert not input_logprobs(PROMPT, SCORES, top=False).top_logprobs


def test_a_stream_has_them_in_its_first_chunk_only() -> None:
    reply = StreamReply(wanted())
    [first] = take(reply, piece([11], scores=True))
    assert list(first.chunk.input_logprobs.token_ids) == PROMPT
    second, end = take(reply, piece([12, 4], end=FinishReason.STOP))
    assert not second.chunk.HasField("input_logprobs")
    assert list(second.chunk.output_logprobs.top_logprobs[0].token_ids) == [9]
    assert (end.complete.matched_token_id, list(end.complete.output_ids)) == (4, [12, 4])
    assert list(end.complete.output_logprobs.token_ids) == [12, 4]
    assert reply.rest("abort") == []


def test_whole_answers_all_have_them() -> None:
    reply = WholeReply(wanted(2), 1 << 16)
    given = [piece([11], scores=True), piece([12], sample=1), piece([13], end=FinishReason.LENGTH)]
    assert [take(reply, each) for each in given] == [[], [], []]
    first, second = (message.complete for message in reply.rest("abort"))
    assert (list(first.output_ids), first.finish_reason, first.completion_tokens) == ([11, 13], "length", 2)
    assert (list(second.output_ids), second.finish_reason, second.cached_tokens) == ([12], "abort", 1)
    for complete in (first, second):
        assert list(complete.input_logprobs.token_ids) == PROMPT
        assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)


def test_what_was_not_sent_is_owed() -> None:
    reply = StreamReply(wanted(2))
    lost = piece([11], end=FinishReason.STOP)
    assert len(reply.messages(lost)) == 2  # but they were never sent
    take(reply, piece([12], sample=1))
    assert reply.sign().chunk.index == 0
    ends = [message.complete for message in reply.rest("abort")]
    assert [(end.index, end.finish_reason, end.prompt_tokens, end.cached_tokens) for end in ends] == [
        (0, "abort", 3, 0),
        (1, "abort", 3, 1),
    ]
    take(reply, lost)
    assert [message.complete.index for message in reply.rest("error")] == [1]
    assert reply.sign().chunk.index == 1


def test_of_an_end_without_tokens_there_is_no_chunk() -> None:
    [end] = take(StreamReply(wanted()), piece([], end=FinishReason.STOP))
    assert end.complete.finish_reason == "stop"
    assert end.complete.WhichOneof("matched_stop") is None


def test_a_whole_answer_must_fit_into_a_message() -> None:
    reply = WholeReply(wanted(), 14 * ENTRY_BYTES)
    take(reply, piece([11], scores=True))  # 5 of the prompt, a token, 2 of it
    take(reply, piece([12]))
    take(reply, piece([13]))
    with pytest.raises(InvalidRequest):
        take(reply, piece([14]))
