"""The two-part way over a cached prefix; without a GPU a plain torch attention stands for the fused ones."""

import math

import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.sdpa import Attend, cudnn_attend, flash_attend, gather_prefix, merge, sdpa_attention
from twostroke.kernels.tolerances import TOLERANCES

NAN = float("nan")


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """An `Attend` in float64, rounded."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.double(), wide_k) * scale
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(
            scores.shape[2] - scores.shape[1] + 1
        )
        scores = scores.masked_fill(later, -math.inf)
    out = torch.einsum("htl,lhd->thd", scores.softmax(-1), wide_v)
    return out.to(q.dtype), scores.logsumexp(-1).float()


def filled(
    device: torch.device, length: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A pool of NaN with one sequence in slot 2; the tables; the sequence's K and V [2, length, kv_heads, head_dim]."""
    pages = -(-length // page)
    pool = torch.full((pages + 4, 2, kv_heads, page, head_dim), NAN, dtype=dtype, device=device)
    tables = torch.zeros(3, pages + 2, dtype=torch.int32, device=device)
    kv = torch.randn(2, length, kv_heads, head_dim, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    numbers = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    for position in range(length):
        pool[1 + numbers[position // page], :, :, position % page] = kv[:, position]
    tables[2, :pages] = torch.tensor(numbers, device=device) + 1
    return pool, tables, kv


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 130])
def test_gathered_prefixes(device, length, page, head_dim):
    pool, tables, kv = filled(device, max(length, 1), 3, head_dim, page, torch.float16)
    gathered = torch.full((2, 3, length + 3, head_dim), 7.0, dtype=torch.float16, device=device)
    k, v = gather_prefix(pool, tables, 2, length, gathered)
    assert torch.equal(k, kv[0, :length])
    assert torch.equal(v, kv[1, :length])
    assert (gathered[:, :, length:] == 7).all()


def test_a_prefix_beyond_the_workspace(device):
    pool, tables, _ = filled(device, 20, 1, 64, 16, torch.float32)
    with pytest.raises(ValueError, match="20 tokens, and room for 19"):
        gather_prefix(pool, tables, 2, 20, torch.empty(2, 1, 19, 64, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [1, 5, 24])
def test_merging_halves_gives_the_whole(device, heads, dtype):
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(n, heads, 80, generator=generator).to(device, dtype) for n in (9, 40, 40))
    whole, _ = plain(q, k, v, False, 0.3)
    parts = [plain(q, k[part], v[part], False, 0.3) for part in (slice(0, 33), slice(33, 40))]
    out = torch.full((9, heads * 80 + 4), NAN, dtype=dtype, device=device)
    merge(*parts[0], *parts[1], out[:, : heads * 80])
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(out[:, : heads * 80], whole.flatten(1), rtol=relative, atol=absolute)
    assert out[:, heads * 80 :].isnan().all()


@pytest.mark.parametrize("gap", [0.0, 50.0, 1000.0])
def test_merging_when_one_part_outweighs_the_other(device, gap):
    one, two = torch.ones(2, 1, 64, device=device), torch.zeros(2, 1, 64, device=device)
    lse = torch.zeros(1, 2, device=device)
    for high, low, expected in ((one, two, 1.0), (two, one, 0.0)):
        out = torch.empty(2, 64, device=device)
        merge(high, lse + gap, low, lse, out)
        torch.testing.assert_close(out, torch.full_like(out, 0.5 if gap == 0 else expected))
        merge(low, lse, high, lse + gap, out)
        torch.testing.assert_close(out, torch.full_like(out, 0.5 if gap == 0 else expected))


def check(device: torch.device, start: int, count: int, head_dim: int, dtype: torch.dtype, attend: Attend) -> None:
    heads, kv_heads = 4, 2
    pool, tables, kv = filled(device, start + count, kv_heads, head_dim, 16, dtype)
    numbers = tables[2].tolist()
    for position in range(start, start + count):  # what the call must take from k and v
        pool[numbers[position // 16], :, :, position % 16] = NAN
    qkv = torch.randn(count, (heads + 2 * kv_heads) * head_dim, generator=torch.Generator().manual_seed(2))
    qkv = qkv.to(device, dtype)
    q, k, v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    k.copy_(kv[0, start:].flatten(1))
    v.copy_(kv[1, start:].flatten(1))
    out = torch.full_like(q, NAN)
    gathered = torch.full((2, kv_heads, start + 5, head_dim), NAN, dtype=dtype, device=device)
    scale = head_dim**-0.5
    sdpa_attention(
        q, k, v, pool, tables, 2, start, gathered, out, heads=heads, kv_heads=kv_heads, scale=scale, attend=attend
    )
    expected, _ = plain(q.unflatten(1, (heads, -1)), kv[0], kv[1], True, scale)
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected.flatten(1), rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("start", [0, 1, 16, 37])
@pytest.mark.parametrize("count", [1, 17, 60])
def test_spans_over_prefixes(device, count, start, dtype):
    check(device, start, count, 64, dtype, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("attend", [cudnn_attend, flash_attend])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((d, torch.bfloat16) for d in (64, 80, 96, 128)), (128, torch.float16)]
)
@pytest.mark.parametrize(("start", "count"), [(0, 300), (37, 17), (200, 64), (16, 513)])
def test_fused_kernels(device, start, count, dtype, head_dim, attend):
    check(device, start, count, head_dim, dtype, attend)
