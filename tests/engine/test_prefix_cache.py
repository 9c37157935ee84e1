"""Hash chains: equal digests for equal beginnings only; the map; pending pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.prefix_cache import (
    DIGEST_BYTES,
    PageContent,
    PendingPages,
    PrefixCache,
    extend_chain,
    page_contents,
    root_digest,
)
from twostroke.engine.request import SequenceKey

ROOT = root_digest(b"model", b"")
TOKENS = st.lists(st.integers(0, 3), max_size=12)


def chain_of(tokens: list[int], page_size: int, root: bytes = ROOT) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, root, tokens, page_size)
    return chain


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_digests_are_equal_exactly_where_the_beginnings_are(a: list[int], b: list[int], size: int) -> None:
    left, right = chain_of(a, size), chain_of(b, size)
    assert (len(left), len(right)) == (len(a) // size, len(b) // size)
    for page, (one, other) in enumerate(zip(left, right, strict=False)):
        end = (page + 1) * size
        assert (one == other) == (a[:end] == b[:end])
        assert len(one) == DIGEST_BYTES


@given(TOKENS, st.integers(0, 12), st.integers(1, 4))
def test_a_chain_grows_with_its_tokens(tokens: list[int], cut: int, size: int) -> None:
    chain = chain_of(tokens[:cut], size)
    extend_chain(chain, ROOT, tokens, size)
    assert chain == chain_of(tokens, size)


def test_a_digest_depends_on_where_its_page_stands() -> None:
    first, second = chain_of([5, 5], 1)
    assert first != second
    assert chain_of([1, 2], 1)[0] == chain_of([1, 2], 1)[0] != chain_of([2, 1], 1)[0]


def test_large_token_ids_do_not_collide() -> None:
    assert chain_of([1 << 20], 1) != chain_of([0], 1) != chain_of([1 << 31], 1)


def test_model_and_salt_separate_chains() -> None:
    roots = {
        root_digest(model, salt) for model, salt in [(b"a", b""), (b"b", b""), (b"a", b"x"), (b"ax", b""), (b"", b"ax")]
    }
    assert len(roots) == 5
    assert chain_of([1], 1, root_digest(b"a", b"x")) != chain_of([1], 1, root_digest(b"a", b"y"))


def test_match_stops_at_the_first_unknown_page() -> None:
    cache = PrefixCache()
    chain = chain_of([1, 2, 3], 1)
    for page, digest in ((7, chain[0]), (9, chain[2])):
        assert cache.add(page, digest)
    assert cache.match(chain) == [7]
    assert cache.match(chain[:0]) == []
    assert cache.add(8, chain[1])
    assert cache.match(chain) == [7, 8, 9]
    cache.forget(7)
    assert cache.match(chain) == []
    assert cache.digest_of(7) is None
    assert len(cache) == 2
    with pytest.raises(KeyError):
        cache.forget(7)


def test_what_a_page_holds_is_kept_as_long_as_it_can_be_found() -> None:
    root, tokens = root_digest(b"model", b""), [1, 2, 3, 1 << 20]
    chain: list[bytes] = []
    extend_chain(chain, root, tokens, 2)
    first, second = page_contents(root, chain, tokens, range(2), 2)
    assert first == PageContent(root, root, bytes([1, 0, 0, 0, 2, 0, 0, 0]))
    assert second == PageContent(root, chain[0], bytes([3, 0, 0, 0, 0, 0, 16, 0]))
    assert page_contents(root, chain, tokens, range(1, 2), 2) == [second]
    assert page_contents(root, chain, tokens, range(2, 2), 2) == []
    cache = PrefixCache()
    assert cache.add(7, chain[0], first)
    assert not cache.add(8, chain[0], second)
    assert cache.content_of(chain[0]) == first
    assert cache.content_of(chain[1]) is None
    cache.forget(7)
    assert cache.content_of(chain[0]) is None


def test_pending_pages_belong_to_who_announced_them_first() -> None:
    pending, a, b = PendingPages(), SequenceKey(1, 1, 0, 0), SequenceKey(1, 2, 0, 0)
    chain = chain_of([1, 2, 3], 1)
    pending.announce(None, chain[:2], a)
    pending.announce(None, chain, b)
    pending.announce(77, chain[:1], b)
    assert pending.entries() == {(None, chain[0]): a, (None, chain[1]): a, (None, chain[2]): b, (77, chain[0]): b}
    pending.withdraw(None, chain, b)
    assert (None, chain[1]) in pending
    assert (None, chain[2]) not in pending
    pending.withdraw(None, chain, a)
    assert (None, chain[0]) not in pending
    assert (77, chain[0]) in pending, "another group's"
    pending.withdraw(77, chain, b)
    assert len(pending) == 0
