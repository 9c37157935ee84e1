from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.rope_write import rope_write
from twostroke.kernels.tolerances import TOLERANCES

EPS = 1e-6


@dataclass
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    tokens: int = 7
    normed: bool = False


SHAPES = [
    Shape(32, 8, 128, 128, 64),
    Shape(9, 3, 64, 64, 16),
    Shape(4, 4, 80, 80, 32),
    Shape(6, 2, 96, 96, 128),
    Shape(8, 4, 256, 256, 16),
    Shape(16, 1, 64, 64, 32),
    Shape(4, 2, 128, 32, 16),
    Shape(3, 1, 96, 72, 16),
    Shape(4, 2, 128, 128, 16, normed=True),
    Shape(5, 1, 80, 48, 16, normed=True),
    Shape(8, 4, 256, 256, 64, normed=True),
    Shape(2, 1, 64, 64, 16, tokens=130),
    Shape(2, 2, 64, 16, 16, tokens=1, normed=True),
]


def make_angles(positions: int, rotary_dim: int) -> Tensor:
    """float64 [positions, rotary_dim]: cosines, then sines."""
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    turns = torch.outer(torch.arange(positions).double(), frequencies)
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def reference(qkv: Tensor, angles: Tensor, shape: Shape, qk_norm: Tensor | None) -> Tensor:
    """float64 [tokens, heads + 2 * kv_heads, head_dim]. `angles`: of each token."""
    x = qkv.double().view(len(qkv), -1, shape.head_dim).clone()
    some = x[:, : shape.heads + shape.kv_heads]
    if qk_norm is not None:
        some *= (some.square().mean(-1, keepdim=True) + EPS).rsqrt() * qk_norm.double()
    cos, sin = angles[:, None].chunk(2, dim=-1)
    x1, x2 = some[..., : shape.rotary_dim].clone().chunk(2, dim=-1)
    some[..., : shape.rotary_dim] = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return x


def check(device, dtype, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(shape.head_dim + shape.tokens)
    n, heads, kv_heads, page_size = shape.tokens, shape.heads, shape.kv_heads, shape.page_size
    slots_used, max_pages = 3, 3 + n // page_size
    pages = 1 + slots_used * max_pages
    tables = torch.zeros(slots_used + 1, max_pages, dtype=torch.int32)
    tables[1:] = (torch.randperm(pages - 1, generator=generator) + 1).view(slots_used, -1)
    slots = torch.randint(1, slots_used + 1, (n,), generator=generator)
    positions = torch.empty(n, dtype=torch.int64)
    for slot in range(1, slots_used + 1):
        mine = slots == slot
        positions[mine] = torch.randperm(max_pages * page_size, generator=generator)[: int(mine.sum())]
    padding = 2 if n > 2 else 0
    slots[n - padding :], positions[n - padding :] = 0, 0
    angles = make_angles(max_pages * page_size, shape.rotary_dim)
    qk_norm = torch.rand(heads + kv_heads, shape.head_dim, generator=generator) + 0.5 if shape.normed else None
    qkv = torch.randn(n, (heads + 2 * kv_heads) * shape.head_dim, generator=generator).to(dtype)
    if padding:
        qkv[-1] = torch.nan
    turned = torch.cat((qkv, torch.full_like(qkv[:1], torch.nan))).to(device)
    pool = torch.full((pages, 2, kv_heads, page_size, shape.head_dim), torch.nan, dtype=dtype, device=device)
    rope_write(
        turned[:n],
        positions.to(torch.int32).to(device),
        slots.to(torch.int32).to(device),
        angles.float().to(device),
        pool,
        tables.to(device),
        heads=heads,
        kv_heads=kv_heads,
        page_size=page_size,
        eps=EPS,
        qk_norm=None if qk_norm is None else qk_norm.to(device),
    )
    live = n - padding
    expected = reference(qkv[:live], angles[positions[:live]], shape, qk_norm)
    relative, absolute = TOLERANCES[dtype]
    result = turned.cpu().view(n + 1, -1, shape.head_dim)
    torch.testing.assert_close(result[:live, :heads].double(), expected[:, :heads], rtol=relative, atol=absolute)
    assert torch.equal(result[:live, heads:], qkv[:live].view(live, -1, shape.head_dim)[:, heads:])
    assert result[n].isnan().all()
    written = pool.cpu()
    page, offset = tables[slots[:live], positions[:live] // page_size].long(), positions[:live] % page_size
    k, v = written[page, 0, :, offset], written[page, 1, :, offset]
    torch.testing.assert_close(k.double(), expected[:, heads : heads + kv_heads], rtol=relative, atol=absolute)
    assert torch.equal(v, qkv[:live].view(live, -1, shape.head_dim)[:, heads + kv_heads :])
    written[page, :, :, offset] = torch.nan
    assert written[1:].isnan().all()  # nothing else but the sink was written to


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_float64(device, dtype, shape):
    check(device, dtype, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, Shape(32, 8, 128, 128, 64, tokens=8192)], ids=str)
def test_equals_float64_in_bfloat16(device, shape):
    check(device, torch.bfloat16, shape)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_values_pass_bit_for_bit(device):
    """Also those that a rotation would spoil: infinities next to zeros, and NaN."""
    qkv = torch.zeros(1, 3 * 64, dtype=torch.float16)
    qkv[0, 128:192:2] = torch.inf
    qkv[0, 129] = torch.nan
    pool = torch.zeros(2, 2, 1, 16, 64, dtype=torch.float16, device=device)
    rope_write(
        qkv.to(device),
        torch.tensor([3], dtype=torch.int32, device=device),
        torch.tensor([1], dtype=torch.int32, device=device),
        make_angles(16, 64).float().to(device),
        pool,
        torch.tensor([[0], [1]], dtype=torch.int32, device=device),
        heads=1,
        kv_heads=1,
        page_size=16,
        eps=EPS,
        qk_norm=None,
    )
    assert torch.equal(pool[1, 1, 0, 3].cpu().view(torch.int16), qkv[0, 128:].view(torch.int16))


@pytest.mark.gpu
def test_a_pool_of_more_than_2_31_elements(device):
    page_elements = 2 * 8 * 64 * 128
    pages = 2**31 // page_elements + 3
    pool = torch.empty(pages, 2, 8, 64, 128, dtype=torch.bfloat16, device=device)
    pool[-1].zero_()
    qkv = torch.randn(1, 48 * 128, device=device).bfloat16()
    rope_write(
        qkv,
        torch.tensor([5], dtype=torch.int32, device=device),
        torch.tensor([1], dtype=torch.int32, device=device),
        make_angles(64, 128).float().to(device),
        pool,
        torch.tensor([[0], [pages - 1]], dtype=torch.int32, device=device),
        heads=32,
        kv_heads=8,
        page_size=64,
        eps=EPS,
        qk_norm=None,
    )
    assert torch.equal(pool[-1, 1, :, 5], qkv.view(48, 128)[40:])
    assert pool[-1, 0, :, 5].any(dim=-1).all()
