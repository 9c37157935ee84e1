"""min-p and typical-p against their definitions, written plainly in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.kernels.typical import keep_likely_, keep_typical_

INF = float("inf")


def probabilities(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def likely_plainly(row: np.ndarray, min_p: float) -> set[int]:
    p = probabilities(row)
    return set(np.flatnonzero((p >= min_p * p.max()) & (p > 0)).tolist())


def typical_plainly(row: np.ndarray, typical_p: float) -> set[int]:
    """Sort by the distance of the surprise from its mean, then take until the share is reached."""
    p = probabilities(row)
    possible = [int(i) for i in np.flatnonzero(p > 0)]
    surprise = {i: -np.log(p[i]) for i in possible}
    mean = sum(p[i] * surprise[i] for i in possible)
    kept, mass = set(), 0.0
    for i in sorted(possible, key=lambda i: (round(abs(surprise[i] - mean), 9), i)):
        if mass >= typical_p - 1e-9:
            break
        kept.add(i)
        mass += p[i]
    return kept


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(row.nonzero().view(-1).tolist()) for row in logits > -INF]


def apart(row: np.ndarray, typical_p: float) -> bool:
    """Whether rounding cannot decide: no two distances and no share are nearly equal where it matters."""
    p = probabilities(row)
    p = p[p > 0]
    distance = np.abs(-np.log(p) - (p * -np.log(p)).sum())
    order = np.argsort(distance)
    gaps = np.diff(distance[order])
    mass = np.cumsum(p[order])
    return bool((gaps > 4e-6).all() and (np.abs(mass - typical_p) > 4e-6).all())


@pytest.mark.parametrize("vocab", [2, 17, 257, 3001])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_min_p_is_its_definition(vocab: int, spread: float) -> None:
    generator = np.random.default_rng(vocab)
    rows = (generator.normal(size=(6, vocab)) * spread).astype(np.float32)
    rows[1, ::2] = -np.inf
    limits = [0.0, 0.5, 0.02, 1.0, 1e-6, 0.9]
    logits = torch.from_numpy(rows.copy())
    keep_likely_(logits, torch.tensor(limits, dtype=torch.float64))
    for row, min_p, got in zip(rows, limits, kept(logits), strict=True):
        assert got == likely_plainly(row.astype(np.float64), min_p)


def test_min_p_keeps_all_of_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.999, -INF]])
    keep_likely_(logits, torch.tensor([1.0], dtype=torch.float64))
    assert logits.tolist() == [[1.0, 1.0, -INF, -INF]]


@pytest.mark.parametrize("candidates", [1, 3, 256])
@pytest.mark.parametrize("vocab", [2, 19, 700])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_typical_p_is_its_definition(vocab: int, spread: float, candidates: int) -> None:
    generator = np.random.default_rng(vocab)
    limits = [0.01, 0.2, 0.5, 0.8, 0.95, 0.9999]
    rows = (generator.normal(size=(len(limits), vocab)) * spread).astype(np.float32)
    rows[2, 1::2] = -np.inf
    logits = torch.from_numpy(rows.copy())
    keep_typical_(logits, torch.tensor(limits, dtype=torch.float64), candidates)
    compared = 0
    for row, typical_p, got in zip(rows, limits, kept(logits), strict=True):
        if apart(row.astype(np.float64), typical_p):
            assert got == typical_plainly(row.astype(np.float64), typical_p)
            compared += 1
    assert compared >= (1 if vocab == 700 else 4)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-5, 0), min_size=1, max_size=60),
    st.sampled_from([0.1, 0.33, 0.5, 0.77, 0.9]),
    st.sampled_from([1, 2, 7]),
)
def test_typical_p_with_ties_everywhere(row: list[int], typical_p: float, candidates: int) -> None:
    """Equal logits are equally near: the lower ids stay, and few candidates change nothing."""
    logits = torch.tensor([row], dtype=torch.float32)
    few, many = logits.clone(), logits.clone()
    limit = torch.tensor([typical_p], dtype=torch.float64)
    keep_typical_(few, limit, candidates)
    keep_typical_(many, limit, 4096)
    assert torch.equal(few, many)
    p = probabilities(np.array(row, dtype=np.float64))
    got = kept(few)[0]
    assert p[list(got)].sum() >= typical_p - 1e-9
    for i in got:
        assert all(j in got for j in range(i) if row[j] == row[i])


def test_typical_p_can_drop_the_likeliest() -> None:
    """One token of 0.3, seventy of 0.01: the many small ones are what is expected."""
    p = np.array([0.3] + [0.01] * 70)
    logits = torch.from_numpy(np.log(p).astype(np.float32)).unsqueeze(0)
    keep_typical_(logits, torch.tensor([0.495], dtype=torch.float64))
    assert kept(logits) == [set(range(1, 51))]


def test_rows_do_not_influence_each_other() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5000, generator=generator)
    limits = torch.tensor([0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    together = logits.clone()
    keep_typical_(together, limits)
    for i in range(4):
        alone = logits[i : i + 1].clone()
        keep_typical_(alone, limits[i : i + 1])
        assert torch.equal(alone[0], together[i])
