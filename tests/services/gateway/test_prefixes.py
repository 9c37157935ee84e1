"""What a gateway knows of cached prefixes: the engine's own chain, what workers tell, what they were sent lately."""

import random

import pytest

from twostroke.engine.prefix_cache import cache_root, extend_chain, root_digest
from twostroke.services.gateway.prefixes import MAX_DIGESTS, CachedPages, ExpectedPages, prefix_digests
from twostroke.services.worker.cache_publisher import messages
from twostroke.v1 import worker_pb2 as pb

PAGE = 16
ROOT = cache_root("print", "float32", PAGE)


def digests(*ids: int, salt: bytes = b"") -> list[bytes]:
    return prefix_digests(ids, PAGE, ROOT, salt)


def test_the_chain_is_the_engines() -> None:
    ids = [random.Random(3).randrange(1000) for _ in range(100)]
    chain: list[bytes] = []
    extend_chain(chain, root_digest(ROOT, b"tenant"), ids, PAGE)
    assert digests(*ids, salt=b"tenant") == [digest[:8] for digest in chain]
    assert len(set(digests(*ids) + digests(*ids, salt=b"tenant"))) == 12
    assert prefix_digests(ids, PAGE, cache_root("other", "float32", PAGE)) != digests(*ids)


def test_the_last_token_is_left_out_and_the_length_is_bounded() -> None:
    assert digests(*[1] * 16) == []
    assert len(digests(*[1] * 17)) == 1
    first = digests(*range(32), 1)
    assert digests(*range(32), 2) == first
    assert digests(99, *range(1, 32), 1)[1] != first[1]
    assert len(digests(*[1] * (PAGE * (MAX_DIGESTS + 5)))) == MAX_DIGESTS


def test_a_worker_s_pages_as_it_tells_them() -> None:
    cached = CachedPages(limit=10)
    a, b, c, d = digests(*range(65))
    assert cached.leading([a, b]) == 0
    cached.apply(pb.CacheEvents(stored=a + b + d))
    assert (cached.leading([a, b, c, d]), cached.leading([b]), len(cached)) == (2, 1, 3)
    cached.apply(pb.CacheEvents(stored=c, evicted=a))
    assert (cached.leading([a, b, c, d]), cached.leading([b, c, d])) == (0, 3)
    cached.apply(pb.CacheEvents(reset=True, stored=a))
    assert (cached.leading([a, b]), len(cached)) == (1, 1)
    cached.apply(pb.CacheEvents(stored=b"odd"))
    assert len(cached) == 1
    cached.apply(pb.CacheEvents(stored=bytes(8 * 11) + b"".join(bytes([i]) * 8 for i in range(1, 12))))
    assert len(cached) == 0


@pytest.mark.parametrize("limit", [5, 1 << 16])
def test_a_gateway_s_picture_follows_a_pool_through_random_life(limit: int) -> None:
    """Pages come, go and come back; told each round, or anew when too much happened between."""
    from twostroke.engine.cache_changes import CacheChanges
    from twostroke.engine.prefix_cache import PrefixCache

    chance, prefix, cached = random.Random(limit), PrefixCache(), CachedPages(1000)
    prefix._changes = CacheChanges(limit)
    live: dict[int, bytes] = {}
    resets = 0
    for _ in range(200):
        for _ in range(chance.randrange(12)):
            page = chance.randrange(60)
            if page in live:
                prefix.forget(page)
                del live[page]
            else:
                digest = bytes([chance.randrange(90)]) * 16
                if prefix.add(page, digest):
                    live[page] = digest
        changes = prefix.take_changes()
        resets += changes.reset
        for message in messages(changes):
            cached.apply(message)
        assert cached._digests == {digest[:8] for digest in live.values()}
    assert (resets > 0) == (limit == 5)


def test_expected_pages_count_leading_ones_only() -> None:
    expected = ExpectedPages(10)
    a, b, c = digests(*range(49))
    expected.record([a, b], [1])
    expected.record([a, b, c], [2])
    assert expected.lookup([a, b, c]) == {1: 2, 2: 3}
    assert expected.lookup([b, c]) == {1: 1, 2: 2}
    assert expected.lookup([c]) == {2: 1}
    expected.record([c], [3])
    assert expected.lookup([a, b, c]) == {1: 2, 2: 3}
    expected.forget([1])
    assert expected.lookup([a, b, c]) == {1: 2}
    assert len(expected) == 2


def test_expected_pages_are_bounded_and_a_prefix_goes_from_its_end() -> None:
    expected = ExpectedPages(3)
    old, new = digests(*range(49)), digests(*range(100, 133))
    expected.record(old, [1])
    expected.record(new, [1])
    assert expected.lookup(old) == {1: 1}
    assert expected.lookup(new) == {1: 2}


def test_what_was_expected_is_not_for_ever() -> None:
    """By then the worker has told that it has the pages, or it has them no more."""
    now = [0.0]
    expected = ExpectedPages(10, expires_s=30, clock=lambda: now[0])
    a, b = digests(*range(33))
    expected.record([a], [1])
    now[0] = 20.0
    expected.record([a, b], [2])
    assert expected.lookup([a, b]) == {1: 1, 2: 2}
    now[0] = 31.0
    assert expected.lookup([a, b]) == {2: 2}
    now[0] = 51.0
    assert expected.lookup([a, b]) == {}
