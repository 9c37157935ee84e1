import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.kernels.sampling import BLOCK, gumbel_race, highest, keep_top_

INF = float("inf")


def kept_plainly(row: list[float], top_k: int, top_p: float) -> set[int]:
    """Sort everything, cut to k, then take until the share reaches p."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: top_k or None]
    weights = [math.exp(row[i] - row[order[0]]) for i in order]
    total, mass, kept = sum(weights), 0.0, set()
    for i, weight in zip(order, weights, strict=True):
        if top_p < 1.0 and mass >= top_p * total - 1e-12:
            break
        kept.add(i)
        mass += weight
    return kept


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 70).flatmap(
        lambda v: st.lists(
            st.tuples(
                st.lists(st.integers(-6, 0), min_size=v, max_size=v),
                st.integers(0, v + 3),
                st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.9, 0.999, 1.0]),
            ),
            min_size=1,
            max_size=4,
        )
    ),
    st.sampled_from([1, 2, 5, 256]),
)
def test_keep_top_equals_a_full_sort(rows, candidates):
    """Integers, so that ties are everywhere; few candidates, so that cuts lie beyond them."""
    logits = torch.tensor([[x * 0.7 for x in row] for row, _, _ in rows])
    result = logits.clone()
    keep_top_(
        result,
        torch.tensor([k for _, k, _ in rows]),
        torch.tensor([p for _, _, p in rows], dtype=torch.float64),
        candidates,
    )
    for i, (_, k, p) in enumerate(rows):
        kept = {j for j, x in enumerate(result[i].tolist()) if x > -INF}
        assert kept == kept_plainly(logits[i].tolist(), k, p)
        assert all(result[i, j] == logits[i, j] for j in kept)


def test_keep_top_of_a_large_vocabulary_with_cuts_at_every_depth():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5003, generator=generator) * torch.tensor([8, 3, 1, 0.1, 1, 1]).unsqueeze(1)
    top_k, top_p = torch.tensor([0, 0, 0, 0, 1, 4999]), torch.tensor([0.9, 0.9, 0.99, 0.99, 1.0, 1.0]).double()
    result = logits.clone()
    keep_top_(result, top_k, top_p)
    sizes = []
    for i in range(6):
        kept = (result[i] > -INF).nonzero().view(-1).tolist()
        assert set(kept) == kept_plainly(logits[i].tolist(), int(top_k[i]), float(top_p[i]))
        sizes.append(len(kept))
    assert sizes[4:] == [1, 4999]
    assert sizes[0] < 256 < sizes[1] < 4096 < sizes[3]


def test_rows_do_not_influence_each_other():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 3000, generator=generator)
    top_k, top_p = torch.tensor([2000, 3, 0]), torch.tensor([1.0, 0.5, 0.8]).double()
    together = logits.clone()
    keep_top_(together, top_k, top_p)
    for i in range(3):
        alone = logits[i : i + 1].clone()
        keep_top_(alone, top_k[i : i + 1], top_p[i : i + 1])
        assert torch.equal(alone[0], together[i])


def race(logits: torch.Tensor, draws: int, seed: int = 5) -> torch.Tensor:
    rows = logits.expand(draws, -1)
    zero = torch.zeros(draws, dtype=torch.int64)
    return gumbel_race(rows - rows.amax(dim=1, keepdim=True), zero + seed, zero, torch.arange(draws))


@pytest.mark.parametrize("vocab", [7, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_the_race_draws_from_the_softmax(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(1, vocab, generator=generator) * 2
    draws = 4000
    counts = torch.bincount(race(logits, draws), minlength=vocab).double()
    expected = logits[0].double().softmax(0) * draws
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    common = int((expected >= 8).sum())
    counts = torch.cat((counts[:common], counts[common:].sum().view(1)))
    expected = torch.cat((expected[:common], expected[common:].sum().view(1)))
    used = expected > 0.5
    chi2 = ((counts - expected) ** 2 / expected)[used].sum().item()
    freedom = int(used.sum()) - 1
    assert abs(chi2 - freedom) < 4 * math.sqrt(2 * freedom), (chi2, freedom)


def test_the_race_never_draws_what_is_excluded():
    logits = torch.full((1, 5 * BLOCK), -INF)
    allowed = [3, BLOCK, 2 * BLOCK + 9, 5 * BLOCK - 1]
    logits[0, allowed] = torch.tensor([0.0, -1.0, -2.0, -0.5])
    assert set(race(logits, 500).tolist()) == set(allowed)


def test_the_race_is_the_same_alone_and_together():
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(5, 1000, generator=generator)
    logits -= logits.amax(dim=1, keepdim=True)
    seeds, samples, positions = torch.tensor([[1, 2, 3, 1, 1], [0, 0, 0, 1, 0], [4, 4, 4, 4, 5]])
    together = gumbel_race(logits, seeds, samples, positions)
    for i in range(5):
        row = slice(i, i + 1)
        assert gumbel_race(logits[row], seeds[row], samples[row], positions[row]) == together[i]


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_highest_finds_the_first_of_equals(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (20, vocab), generator=generator).to(dtype)
    values, ids = highest(logits)
    for row, value, token in zip(logits.tolist(), values.tolist(), ids.tolist(), strict=True):
        assert value == max(row)
        assert token == row.index(max(row))


def test_highest_reports_nan_and_infinity():
    logits = torch.zeros(3, 700)
    logits[0, 600], logits[1, 5] = float("nan"), INF
    assert highest(logits)[0].isfinite().tolist() == [False, False, True]
