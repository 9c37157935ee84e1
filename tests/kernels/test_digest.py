"""Digests of pages: what they must notice."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twostroke.kernels.digest import fold_layers, page_digests, pool_digests

MASK = (1 << 64) - 1


def one(page: Tensor, **names: int) -> bytes:
    return page_digests(page.unsqueeze(0), [0], **{"ticket": 1, "layer": 0, "ordinal": 0, **names})


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def plain(page: bytes, ticket: int, layer: int, ordinal: int) -> bytes:
    """The definition, in Python's integers."""
    total = mix(mix(mix(ticket) ^ layer) ^ ordinal)
    for i in range(len(page) // 8):
        word = int.from_bytes(page[8 * i : 8 * i + 8], "little")
        multiplier = mix(i + 0x9E3779B97F4A7C15 & MASK) << 25 | 2 * i + 1
        total += (word ^ word >> 32) * multiplier
    return mix(total & MASK).to_bytes(8, "little")


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=120), st.integers(0, MASK), st.integers(0, 200), st.integers(0, 4000))
def test_equals_its_definition(data: bytes, ticket: int, layer: int, ordinal: int) -> None:
    page = data + bytes(8 - len(data) % 8)
    tensor = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    assert one(tensor, ticket=ticket, layer=layer, ordinal=ordinal) == plain(page, ticket, layer, ordinal)


def test_every_changed_byte_is_noticed() -> None:
    page = torch.randint(0, 256, (40,), dtype=torch.uint8)
    right = one(page)
    for place, delta in itertools.product(range(40), range(1, 256)):
        changed = page.clone()
        changed[place] ^= delta
        assert one(changed) != right


@pytest.mark.parametrize("kind", ["random", "signs", "high halves", "small"])
def test_every_swap_of_two_words_is_noticed(kind: str) -> None:
    count = 64
    words = {
        "random": torch.randint(-(2**63), 2**63 - 1, (count,)),
        "signs": torch.tensor([0, -(2**63)]).repeat(count // 2),  # differ in the top bit only
        "high halves": torch.arange(count) << 58,
        "small": torch.arange(count),
    }[kind]
    right = one(words.view(torch.uint8))
    for i, j in itertools.combinations(range(count), 2):
        swapped = words.clone()
        swapped[i], swapped[j] = words[j].clone(), words[i].clone()
        assert (one(swapped.view(torch.uint8)) == right) == (words[i] == words[j]).item()


def test_two_flipped_signs_are_noticed() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (64,))
    right = one(words.view(torch.uint8))
    for i, j in itertools.combinations(range(64), 2):
        flipped = words.clone()
        flipped[[i, j]] ^= -(2**63)
        assert one(flipped.view(torch.uint8)) != right


def test_swapped_stale_and_zeroed_pages_are_noticed() -> None:
    pool = torch.randint(0, 256, (6, 96), dtype=torch.uint8)
    pool[5] = 0
    names = {"ticket": 3, "layer": 1, "ordinal": 0}
    right = page_digests(pool, [1, 2, 3], **names)
    for other in ([2, 1, 3], [1, 3, 2], [4, 2, 3], [1, 2, 5], [1, 1, 3]):
        digests = page_digests(pool, other, **names)
        for i in range(3):
            same = other[i] == [1, 2, 3][i]
            assert (digests[8 * i : 8 * i + 8] == right[8 * i : 8 * i + 8]) == same


def test_ticket_layer_and_ordinal_salt_even_equal_pages() -> None:
    pool = torch.zeros((2, 64), dtype=torch.uint8)
    seen = {
        page_digests(pool, [0], ticket=ticket, layer=layer, ordinal=ordinal)
        for ticket, layer, ordinal in itertools.product(range(1, 9), range(8), range(8))
    }
    assert len(seen) == 8**3


@pytest.mark.parametrize("page_bytes", [8, 24, 1000, 12288, 1 << 20])
def test_the_same_alone_together_and_by_layers(page_bytes: int) -> None:
    pool = torch.randint(0, 256, (2, 7, page_bytes), dtype=torch.uint8)
    ids = [6, 1, 4, 4, 2]
    together = pool_digests(pool, ids, ticket=5, first_layer=3, ordinal=10)
    by_layer = [page_digests(pool[k], ids, ticket=5, layer=3 + k, ordinal=10) for k in range(2)]
    alone = [
        page_digests(pool[k], [page], ticket=5, layer=3 + k, ordinal=10 + i)
        for k in range(2)
        for i, page in enumerate(ids)
    ]
    assert together == b"".join(by_layer) == b"".join(alone)
    assert len(together) == 2 * len(ids) * 8
    assert page_digests(pool[0], [], ticket=5, layer=3, ordinal=10) == b""


def test_strided_pools_and_other_dtypes() -> None:
    pool = torch.randn((2, 5, 2, 3, 4, 16), dtype=torch.bfloat16)  # [layers, pages, KV, heads, page_size, dim]
    flat = pool.view(2, 5, -1).view(torch.uint8)
    packed = flat[1, [3, 0]].clone()
    names = {"ticket": 1, "layer": 1, "ordinal": 0}
    assert page_digests(flat[1], [3, 0], **names) == page_digests(packed, [0, 1], **names)
    with pytest.raises(ValueError, match="64-bit words"):
        page_digests(torch.zeros((2, 12), dtype=torch.uint8), [0], **names)
    with pytest.raises(ValueError, match="uint8"):
        page_digests(torch.zeros((2, 16), dtype=torch.int32), [0], **names)


def test_layers_are_folded_by_their_sum() -> None:
    words = [3, (1 << 64) - 1, 1 << 40, 5, 2, 1 << 63]  # two layers of three pages
    data = b"".join(word.to_bytes(8, "little") for word in words)
    folded = fold_layers(data, 3)
    assert [int.from_bytes(folded[i : i + 8], "little") for i in (0, 8, 16)] == [8, 1, (1 << 63) + (1 << 40)]
    assert fold_layers(b"", 0) == b""
    with pytest.raises(ValueError, match="reshape"):
        fold_layers(data[:-8], 3)


def test_a_fault_in_any_layer_is_seen_after_folding() -> None:
    pool = torch.randint(0, 256, (3, 4, 64), dtype=torch.uint8)
    names = {"ticket": 9, "first_layer": 0, "ordinal": 0}
    whole = fold_layers(pool_digests(pool, [0, 1, 2, 3], **names), 4)
    for layer in range(3):
        for page in range(4):
            bad = pool.clone()
            bad[layer, page, 17] ^= 4
            told = fold_layers(pool_digests(bad, [0, 1, 2, 3], **names), 4)
            assert [whole[i : i + 8] == told[i : i + 8] for i in range(0, 32, 8)] == [i != page for i in range(4)]
    crossed = pool.clone()
    crossed[0, 2], crossed[1, 2] = pool[1, 2], pool[0, 2]  # the same pages, in each other's layers
    assert fold_layers(pool_digests(crossed, [0, 1, 2, 3], **names), 4)[16:24] != whole[16:24]
