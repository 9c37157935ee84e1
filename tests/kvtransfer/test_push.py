"""A ticket's account on the prefill side, and a prompt's."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kvtransfer.messages import FirstToken, Ticket
from twostroke.kvtransfer.push import Push, runs
from twostroke.kvtransfer.source import Source


@given(st.sets(st.integers(0, 60)))
def test_runs_cover_the_ordinals_in_as_few_stretches_as_possible(ordinals: set[int]) -> None:
    stretches = list(runs(ordinals))
    assert [i for stretch in stretches for i in stretch] == sorted(ordinals)
    assert all(a.stop < b.start for a, b in itertools.pairwise(stretches))


@given(st.data(), st.integers(1, 50), st.integers(1, 5))
def test_every_page_is_launched_once_whatever_the_chunks(data: st.DataObject, total: int, page_size: int) -> None:
    needed = -(-total // page_size)
    skip = data.draw(st.integers(0, needed))
    table = tuple(range(100, 100 + needed))
    push = Push(1, Ticket(1, "k", 0, tuple(range(1, 1 + needed - skip)), skip * page_size, 9.0), 2, page_size, 9.0)
    source = Source("k", 1, 2, page_size)
    ready, launched = 0, []
    while ready < total:
        ready = data.draw(st.integers(ready + 1, total))
        for layer in range(2):
            assert source.advance(range(layer, layer + 1), table, ready, total)
            for index in range(source.whole_pages(layer)):
                assert ready == total or (index + 1) * page_size <= ready
            ordinals = push.due(layer, source.whole_pages(layer))
            if ordinals:
                launched.append(push.launch(len(launched), layer, ordinals, source.pages))
    pairs = [(c.layer, s, d) for c in launched for s, d in zip(c.src, c.dst, strict=True)]
    wanted = [(layer, 100 + skip + i, 1 + i) for layer in range(2) for i in range(needed - skip)]
    assert sorted(pairs) == sorted(wanted)
    assert push.all_launched()
    assert source.mismatch(skip * page_size, needed - skip) == ""
    assert source.mismatch(skip * page_size, needed - skip + 1) != ""


def test_progress_is_what_has_landed() -> None:
    push = Push(1, Ticket(1, "k", 0, (1, 2, 3), 0, 9.0), 2, 4, 9.0)
    assert push.progress() == (0, 0)
    places = ((0, 0), (0, 1), (1, 0))
    copies = [push.launch(n, layer, range(o, o + 1), (7, 8, 9)) for n, (layer, o) in enumerate(places)]
    assert push.progress() == (0, 0)
    push.landed(copies[0].copy, bytes(8))
    assert push.progress() == (1, 1)
    push.landed(copies[2].copy, b"\2" * 8)
    assert push.progress() == (2, 1)
    push.landed(copies[1].copy, b"\3" * 8)
    assert push.progress() == (1, 2)
    assert bytes(push.digests) == bytes(8) + b"\3" * 8 + bytes(8) + b"\2" * 8 + bytes(16)
    with pytest.raises(ValueError, match="digests"):
        push.landed(push.launch(9, 0, range(2, 3), (7, 8, 9)).copy, b"")


def test_a_source_starts_over_when_what_was_ready_is_contradicted() -> None:
    source = Source("k", 1, 2, 4)
    assert source.advance(range(1), [1, 2, 3], 8, 10)
    assert source.advance(range(1, 2), [1, 2, 3], 8, 10)
    assert not source.advance(range(1), [4, 5, 6], 9, 10)
    assert (source.whole_pages(0), source.whole_pages(1)) == (2, 0)
    assert not source.advance(range(1), [4, 5, 6], 8, 10)
    source.finish((FirstToken(0, 1, 0),))
    assert (source.whole_pages(0), source.whole_pages(1), source.finished()) == (3, 3, False)
    source.restart()
    assert (source.whole_pages(0), source.whole_pages(1)) == (0, 0)
