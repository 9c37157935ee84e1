"""A request's measures, from messages with known times."""

import pytest

from twostroke.services.load.record import BAD_INDEX, CANCELLED, NO_FINISH, OK, Record
from twostroke.services.load.tally import Tally
from twostroke.v1 import inference_pb2 as pb


def piece(first: int, count: int, *, finish: bool = False) -> pb.GenerateResponse:
    message = pb.GenerateResponse(first_index=first, token_ids=range(count))
    if finish:
        message.finish.usage.CopyFrom(pb.Usage(prompt_tokens=100, cached_tokens=25, output_tokens=first + count))
        message.finish.timings.CopyFrom(pb.Timings(queue_us=1500, prefill_us=2500, transfer_us=500))
        message.finish.prefill_worker, message.finish.decode_worker = "p-0", "d-0"
    return message


def finished() -> Record:
    """Sent at 10.0; tokens at 10.5 (1), 10.8 (1), 11.0 (2); the end at 11.25."""
    record = Record(3, scheduled=9.9, sent=10.0)
    record.take(piece(0, 1), 10.5)
    record.take(piece(1, 1), 10.8)
    record.take(piece(2, 0), 10.9)
    record.take(piece(2, 2), 11.0)
    record.take(piece(4, 0, finish=True), 11.2)
    record.end(OK, 11.25)
    return record


def test_measures_by_definition() -> None:
    record = finished()
    assert record.status == OK
    assert record.tokens == 4
    assert record.ttft == pytest.approx(0.5)
    assert record.gap01 == pytest.approx(0.3)
    assert list(record.gaps) == pytest.approx([0.3, 0.2, 0.0])
    assert record.tpot == pytest.approx(0.5 / 3)
    assert record.end_to_end == pytest.approx(1.25)
    assert record.lateness == pytest.approx(0.1)
    assert sum(record.gaps) == pytest.approx(record.tpot * 3)  # type: ignore[operator]


def test_one_token_and_two_at_once() -> None:
    record = Record(0, sent=1.0)
    record.take(piece(0, 1, finish=True), 2.0)
    record.end(OK, 2.0)
    assert (record.ttft, record.gap01, record.tpot, record.lateness) == (1.0, None, None, None)
    record = Record(0, sent=1.0)
    record.take(piece(0, 2, finish=True), 2.0)
    record.end(OK, 2.0)
    assert (record.ttft, record.gap01, record.tpot) == (1.0, 0.0, 0.0)


def test_no_token_at_all() -> None:
    record = Record(0, sent=1.0)
    record.end("UNAVAILABLE", 1.5, "gone")
    assert (record.status, record.message, record.ttft, record.end_to_end) == ("UNAVAILABLE", "gone", None, 0.5)


def test_streams_that_contradict_themselves_are_failures() -> None:
    record = Record(0)
    record.take(piece(0, 1), 1.0)
    record.end(OK, 2.0)
    assert record.status == NO_FINISH
    for first in (0, 2):
        record = Record(0)
        record.take(piece(0, 1), 1.0)
        record.take(piece(first, 1), 1.0)
        record.take(piece(2, 0, finish=True), 1.0)
        record.end(OK, 2.0)
        assert record.status == BAD_INDEX


def test_lines() -> None:
    assert finished().as_dict(9.0) == {
        "index": 3, "status": "OK", "sent_ms": 1000.0, "lateness_ms": 100.0, "ttft_ms": 500.0, "gap01_ms": 300.0,
        "itl_max_ms": 200.0, "tpot_ms": 166.667, "e2e_ms": 1250.0, "output_tokens": 4, "prompt_tokens": 100,
        "cached_tokens": 25, "queue_ms": 1.5, "prefill_ms": 2.5, "transfer_ms": 0.5, "prefill_worker": "p-0",
        "decode_worker": "d-0",
    }  # fmt: skip
    record = Record(0, sent=1.0)
    record.end("INTERNAL", 2.0, "words that belong into no file")
    assert record.as_dict(1.0) == {
        "index": 0, "status": "INTERNAL", "sent_ms": 0.0, "lateness_ms": None, "ttft_ms": None, "gap01_ms": None,
        "itl_max_ms": None, "tpot_ms": None, "e2e_ms": 1000.0, "output_tokens": 0,
    }  # fmt: skip


def test_a_tally_counts_what_succeeded() -> None:
    tally = Tally()
    for record in (finished(), finished()):
        tally.sending(record)
        tally.add(record)
    failed = Record(1, sent=9.0, scheduled=9.0)
    failed.take(piece(0, 1), 9.5)
    tally.sending(failed)
    failed.end("UNAVAILABLE", 13.0, "gone")
    tally.add(failed)
    again = Record(1, sent=12.0)
    again.end("UNAVAILABLE", 12.5, "other words")
    tally.add(again)
    stopped = Record(2, sent=12.0)
    tally.sending(stopped)
    stopped.end(CANCELLED, 99.0)
    tally.add(stopped)
    assert (tally.sent, tally.succeeded, tally.failed, tally.cancelled) == (4, 2, 2, 1)
    assert (tally.errors, tally.messages) == ({"UNAVAILABLE": 2}, {"UNAVAILABLE": "gone"})
    assert tally.error_rate == 0.5
    assert [sample.count for sample in (tally.ttft, tally.gap01, tally.itl, tally.tpot, tally.end_to_end)] == [
        2, 2, 4, 2, 2,
    ]  # fmt: skip
    assert tally.lateness.count == 3  # of all that were planned, failed or not
    assert (tally.input_tokens, tally.cached_tokens, tally.output_tokens) == (200, 50, 8)
    assert tally.cached_share == 0.25
    assert (tally.began, tally.ended, tally.seconds) == (9.0, 13.0, 4.0)
    assert tally.a_second(tally.output_tokens) == 2.0


def test_an_empty_tally() -> None:
    tally = Tally()
    assert (tally.seconds, tally.error_rate, tally.cached_share, tally.a_second(5)) == (0.0, 0.0, 0.0, 0.0)
