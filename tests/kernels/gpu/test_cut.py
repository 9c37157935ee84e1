"""Which tokens top-k, top-p and min-p keep, against the references that sort."""

import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.blocks import BLOCK, summarize
from twostroke.kernels.gpu.cut import cut
from twostroke.kernels.sampling import keep_top_
from twostroke.kernels.typical import keep_likely_

INF, NAN = float("inf"), float("nan")
Filter = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def kept(logits: Tensor, filters: list[Filter], device: torch.device) -> list[list[int]]:
    """Token ids that the GPU keeps; checks that the blocks' sums are theirs."""
    rows, vocab = logits.shape
    wide = torch.full((rows, vocab + 16), NAN, dtype=logits.dtype, device=device)
    wide[:, :vocab] = logits.to(device)
    logits = wide[:, :vocab]
    shape = (rows, -(-vocab // BLOCK))
    maxima, sums = (torch.full(shape, NAN, device=device) for _ in range(2))
    active = torch.full(shape, 2**30, dtype=torch.int32, device=device)
    edges, lasts = torch.full((rows, 2), NAN, device=device), torch.full((rows,), -7, dtype=torch.int32, device=device)
    heat, top_p, min_p = (torch.tensor([f[i] for f in filters], dtype=torch.float64, device=device) for i in (0, 2, 3))
    top_k = torch.tensor([f[1] for f in filters], dtype=torch.int32, device=device)
    heat = heat.float()
    summarize(logits, maxima, sums, heat, weights=True)
    cut(logits, heat, top_k, top_p, min_p, maxima=maxima, sums=sums, active=active, edges=edges, lasts=lasts)
    values, ids = logits.float(), torch.arange(vocab, device=device)
    values = torch.where(values < INF, values, torch.finfo(torch.float32).min)
    stay = (values >= edges[:, :1]) & ((values >= edges[:, 1:]) | (ids <= lasts[:, None])) & (values > -INF)
    for i in range(rows):
        powers = torch.where(stay[i], ((values[i] - values[i].max()) / heat[i]).double().exp(), 0.0)
        shares = sums[i].double() * ((maxima[i] - values[i].max()) / heat[i]).double().exp()
        blocks = torch.nn.functional.pad(powers, (0, -vocab % BLOCK)).view(-1, BLOCK).sum(1)
        assert torch.allclose(shares.nan_to_num(), blocks, rtol=2e-5, atol=1e-9)
    return [row.nonzero().squeeze(1).tolist() for row in stay.cpu()]


def kept_plainly(logits: Tensor, filters: list[Filter]) -> list[list[int]]:
    values = logits.float()
    values = (values - values.amax(dim=1, keepdim=True)) / torch.tensor([[f[0]] for f in filters])
    top_p, min_p = (torch.tensor([f[i] for f in filters], dtype=torch.float64) for i in (2, 3))
    keep_top_(values, torch.tensor([f[1] for f in filters]), top_p)
    keep_likely_(values, min_p)
    return [row.nonzero().squeeze(1).tolist() for row in values > -INF]


def filters_of(vocab: int) -> list[Filter]:
    return [
        (0.7, 1, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, vocab // 2 + 1, 1.0, 0.0),
        (0.7, vocab, 1.0, 0.0),
        (1.0, 0, 0.02, 0.0),
        (0.8, 0, 0.5, 0.0),
        (1.5, 0, 0.95, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.9, 0, 1.0, 1.0),
        (1.0, 20, 0.7, 0.0),
        (1.0, vocab - 1, 0.4, 0.2),
        (1e-30, 50, 0.9, 0.1),
    ]


def rows_like(kind: str, rows: int, vocab: int) -> Tensor:
    normal = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "flat":
        return normal * 0.3
    if kind == "equals":
        return (normal * 2).round() / 2
    if kind == "negative":
        return normal.abs() * -30 - 1
    if kind == "tiny":
        return normal * 1e-6
    if kind == "banned":
        return torch.where(normal > 0.5, normal * 4, -INF)
    return normal * 4  # peaked


KINDS = ["peaked", "flat", "equals", "negative", "tiny", "banned"]


def check(logits: Tensor, filters: list[Filter], device: torch.device) -> None:
    possible = [set(row.nonzero().squeeze(1).tolist()) for row in logits > -INF]
    expected = [sorted(set(ids) & own) for ids, own in zip(kept_plainly(logits, filters), possible, strict=True)]
    assert kept(logits, filters, device) == expected


PARTS = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 4))]  # the interpreter needs 0.2 s a row


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(kind, dtype, part, device):
    vocab = 700
    filters = filters_of(vocab)[(KINDS.index(kind) + dtype.itemsize + part) % 4 :: 4]
    check(rows_like(kind, len(filters), vocab).to(dtype), filters, device)


@pytest.mark.parametrize(("vocab", "top_k"), [(1, 1), (2, 1), (256, 255), (257, 3), (9000, 40)])
def test_odd_vocabularies(vocab, top_k, device):
    check(rows_like("peaked", 2, vocab).half(), [(1.0, top_k, 0.9, 0.0), (0.5, 0, 0.6, 0.0)], device)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_few_blocks_that_hold_most_of_the_weight(dtype, device):
    """As in language models, whose frequent tokens have low ids; the highest logits lie elsewhere."""
    vocab = 24 * BLOCK
    logits = rows_like("flat", 4, vocab)
    logits[:, : 2 * BLOCK] += 5
    logits[:, 5 * BLOCK :: BLOCK] += 6.5
    check(logits.to(dtype), [(1.0, 0, p, 0.0) for p in (0.1, 0.5, 0.8, 0.97)], device)


@pytest.mark.parametrize("value", [-0.0, 3e38, NAN])
def test_all_alike(value, device):
    """Nothing but ties: the lower token ids stay."""
    logits = torch.full((3, 600), value, dtype=torch.bfloat16)
    filters = [(1.0, 300, 1.0, 0.0), (0.1, 0, 0.5, 0.0), (1.0, 400, 0.5, 0.5)]
    assert kept(logits, filters, device) == [list(range(300)), list(range(300)), list(range(200))]


def test_rows_without_a_filter_keep_their_sums_and_all_tokens(device):
    logits = rows_like("peaked", 3, 600)
    everything = list(range(600))
    assert kept(logits, [(1.0, 0, 1.0, 0.0), (1.0, 600, 1.0, 0.0), (1.0, 5000, 1.0, 0.0)], device) == [everything] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [128_256, 151_936, 262_144 + 17])
def test_large_vocabularies(vocab, kind, dtype, device):
    """Sums of 100,000 weights round differently in different orders: a few tokens at the edge of top-p may differ."""
    filters = [*filters_of(vocab), (1.0, 50, 1.0, 0.0), (1.0, 50, 0.9, 0.0), (1.0, 600, 1.0, 0.05)]
    logits = rows_like(kind, len(filters), vocab).to(dtype)
    results = kept(logits, filters, device), kept_plainly(logits, filters)
    for (_, _, top_p, _), row, own, wanted in zip(filters, logits > -INF, *results, strict=True):
        differ = set(own) ^ {i for i in wanted if row[i]}
        assert len(differ) <= (0 if top_p >= 1.0 else 1 + len(wanted) // 10_000)
