"""Products with few rows, against float64, over shapes that no block divides."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.gemm import Config, GemmWorkspace, gemm
from twostroke.kernels.tolerances import TOLERANCES

SMALL = Config(block_m=16, block_n=64, block_k=32, programs=7, num_warps=4, num_stages=3)


def product(x: Tensor, weight: Tensor, config: Config, bias: Tensor | None = None, repeat: int = 1) -> Tensor:
    """x [m, k] times weight [n, k] -> [m, n], in a workspace just large enough and full of NaN."""
    m, k, n = *x.shape, weight.shape[0]
    workspace = GemmWorkspace(x.device, floats=config.partial_floats(m, n, k), counters=config.counters(m, n))
    wide = torch.full((m, n + 8), torch.nan, dtype=x.dtype, device=x.device)  # a view's rows, to catch what lies beside
    out = wide[:, :n]
    for _ in range(repeat):
        workspace.partials.fill_(torch.nan)
        gemm(x, weight, out, config=config, workspace=workspace, bias=bias)
        assert not workspace.counters.any()
    assert wide[:, n:].isnan().all()
    return out


def check(x: Tensor, weight: Tensor, config: Config, bias: Tensor | None = None, repeat: int = 1) -> None:
    """Values of order 1, so the table's tolerances hold."""
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    relative, absolute = TOLERANCES[x.dtype]
    actual = product(x, weight, config, bias, repeat).double()
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k], weight [n, k], bias [n]; the rows of x lie apart with NaN between them, and so does what follows."""
    generator = torch.Generator().manual_seed(m + 1000 * n + k)
    padded = torch.full((m + 1, k + 8), torch.nan)
    padded[:m, :k] = torch.randn(m, k, generator=generator)
    spread = torch.full((n * k + 64,), torch.nan)
    spread[: n * k] = torch.randn(n * k, generator=generator) / k**0.5
    x = padded.to(device, dtype)[:m, :k]
    weight = spread.to(device, dtype)[: n * k].view(n, k)
    return x, weight, torch.randn(n, generator=generator).to(device, dtype)


@pytest.mark.parametrize(
    ("tma", "flat", "dtype"),
    [
        (False, True, torch.float16),
        (True, False, torch.float32),
        pytest.param(False, True, torch.float32, marks=pytest.mark.slow),
        pytest.param(True, False, torch.float16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 32), (2, 65, 33), (5, 200, 144), (16, 7, 200), (17, 130, 72), (33, 96, 64)]
)
def test_odd_shapes(m: int, n: int, k: int, tma: bool, flat: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = operands(m, n, k, dtype, device)
    check(x, weight, replace(SMALL, tma=tma, flat=flat), bias if n % 2 else None, repeat=2)


@pytest.mark.parametrize("flat", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 16, 1000])
def test_shares(programs: int, flat: bool, device: torch.device) -> None:
    """Fewer programs than tiles, as many, a few a tile, and one a block: all sum the same blocks once."""
    x, weight, _ = operands(3, 180, 160, torch.float32, device)  # 3 tiles of 5 blocks
    check(x, weight, replace(SMALL, programs=programs, flat=flat), repeat=2)


@pytest.mark.parametrize(
    ("block_m", "block_n", "block_k"),
    [
        (8, 64, 64),
        (32, 16, 128),
        (64, 128, 16),
        (16, 256, 16),
        (1, 8, 128),
        pytest.param(1, 4, 64, marks=pytest.mark.slow),
    ],
)
def test_blocks(block_m: int, block_n: int, block_k: int, device: torch.device) -> None:
    config = Config(block_m, block_n, block_k, programs=5, num_warps=4, num_stages=2)
    for m in (1, 9) if block_m > 1 else (1, 3):
        x, weight, bias = operands(m, 150, 200, torch.float16, device)
        check(x, weight, config, bias)


def test_a_nan_row_stays_alone(device: torch.device) -> None:
    """A row of x that holds NaN spoils its own results only; rows past the last are never stored."""
    x, weight, _ = operands(6, 70, 96, torch.float32, device)
    x[4] = torch.nan
    actual = product(x, weight, SMALL)
    assert actual[4].isnan().all()
    assert not actual[[0, 1, 2, 3, 5]].isnan().any()


def test_no_rows(device: torch.device) -> None:
    x, weight, _ = operands(0, 70, 96, torch.float32, device)
    assert product(x, weight, SMALL).shape == (0, 70)


@pytest.mark.parametrize("fault", ["shape", "layout", "dtype", "floats", "counters"])
def test_refusals(fault: str, device: torch.device) -> None:
    x, weight, _ = operands(4, 70, 96, torch.float32, device)
    out = torch.empty(4, 71 if fault == "shape" else 70, device=device)
    if fault == "layout":
        weight = weight.T.contiguous().T
    if fault == "dtype":
        x = x.half()
    floats = SMALL.partial_floats(4, 70, 96) - (fault == "floats")
    workspace = GemmWorkspace(device, floats=floats, counters=SMALL.counters(4, 70) - (fault == "counters"))
    with pytest.raises(ValueError, match=r"fit|contiguous|weight|workspace"):
        gemm(x, weight, out, config=SMALL, workspace=workspace)


@pytest.mark.gpu
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("m", [1, 8, 17, 64, 130, 256])
def test_large(m: int, tma: bool, flat: bool, device: torch.device) -> None:
    """bf16 at a model's sizes, against cuBLAS in float32; twice, bit for bit."""
    generator = torch.Generator(device).manual_seed(m)
    for n, k in ((6144, 4096), (4096, 14336), (28672, 4096)):
        x = torch.randn(m, k, device=device, generator=generator).bfloat16()
        weight = (torch.randn(n, k, device=device, generator=generator) / k**0.5).bfloat16()
        block_m = min(max(16, 1 << (m - 1).bit_length()), 128)
        config = Config(block_m, 128, 64, programs=132, num_warps=8, num_stages=4, flat=flat, tma=tma)
        first = product(x, weight, config)
        expected = x.float() @ weight.float().T
        relative, absolute = TOLERANCES[torch.bfloat16]
        torch.testing.assert_close(first.float(), expected, rtol=relative, atol=absolute)
        assert torch.equal(first, product(x, weight, config))


@pytest.mark.gpu
def test_a_weight_past_2_31_elements(device: torch.device) -> None:
    """Offsets into the weight are 64 bits wide."""
    n, k = 140_000, 16_384
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device=device)
    weight[-1] = 1
    x = torch.ones(1, k, dtype=torch.bfloat16, device=device)
    for config in (
        Config(16, 64, 128, 264, 4, 4),
        Config(16, 64, 128, 264, 4, 4, tma=True),
        Config(1, 8, 1024, 0, 4, 1),
    ):
        actual = product(x, weight, config)
        assert actual[0, -1] == k
        assert not actual[0, :-1].any()
