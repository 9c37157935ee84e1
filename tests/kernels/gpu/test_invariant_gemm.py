"""Products whose rows do not depend on each other, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from twostroke.kernels.gpu import invariant_gemm
from twostroke.kernels.gpu.gemm import GemmWorkspace
from twostroke.kernels.gpu.invariant_gemm import invariant_linear_, invariant_workspace
from twostroke.kernels.tolerances import TOLERANCES


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, k], weight [n, k] -> [m, n], in a workspace full of NaN."""
    m, k = x.shape
    n = weight.shape[0]
    workspace = invariant_workspace(x.device, [(n, k)], m, x.dtype)
    workspace.partials.fill_(torch.nan)
    out = torch.full((m, n), torch.nan, dtype=x.dtype, device=x.device)
    invariant_linear_(x, weight, bias, out, workspace)
    assert not workspace.counters.any()
    return out


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k], weight [n, k], bias [n]; results are of order 1."""
    generator = torch.Generator().manual_seed(m + 1000 * n + k)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((m, k), (n, k), (n,)))
    return x.to(device, dtype), (weight / k**0.5).to(device, dtype), bias.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 1024), (3, 200, 1100), (5, 7, 33), (130, 70, 2048), (70, 300, 64)])
def test_odd_shapes(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = operands(m, n, k, dtype, device)
    expected = x.double() @ weight.double().T + bias.double()
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(product(x, weight, bias).double(), expected, rtol=relative, atol=absolute)


@pytest.fixture
def ordered_dots(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by a BLAS, whose order of sums depends on the column; the tensor cores' does not."""

    def dot(_: Any, a: Any, b: Any, acc: Any, *__: Any) -> Any:
        products = a.data.astype(acc.data.dtype)[:, :, None] * b.data.astype(acc.data.dtype)[None]  # [n, k, m]
        return TensorHandle(products.sum(1) + acc.data, acc.dtype.scalar)

    if device.type == "cpu":
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_row_is_alone(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch of 1 to 130 rows gives each row the bits that it gets alone, by programs of parts or of all parts."""
    x, weight, bias = operands(130, 96, 1600, dtype, device)
    alone = torch.cat([product(x[i : i + 1], weight, bias) for i in range(0, 130, 13)])
    for m in (2, 13, 14, 63, 64, 65, 66, 105, 127, 128, 129, 130):
        assert torch.equal(product(x[:m], weight, bias)[::13], alone[: -(-m // 13)]), m
    monkeypatch.setattr(invariant_gemm, "MOST_PROGRAMS", 0)
    assert torch.equal(product(x, weight, bias)[::13], alone)


@pytest.mark.usefixtures("ordered_dots")
def test_any_position(device: torch.device) -> None:
    """The same row everywhere, among rows of NaN."""
    x, weight, _ = operands(1, 40, 1100, torch.float16, device)
    alone = product(x, weight)
    for m, positions in ((7, range(7)), (130, (0, 1, 63, 64, 127, 128, 129))):
        for position in positions:
            batch = torch.full((m, 1100), torch.nan, dtype=torch.float16, device=device)
            batch[position] = x
            actual = product(batch, weight)
            assert torch.equal(actual[position], alone[0])
            assert actual.isnan().all(1).sum() == m - 1


@pytest.mark.usefixtures("ordered_dots")
def test_pointers_and_descriptors_agree(device: torch.device) -> None:
    """Where rows are not aligned, loads are masked ones; the bits are the same."""
    x, weight, _ = operands(3, 70, 1104, torch.float16, device)
    spread = torch.full((70 * 1104 + 1,), torch.nan, dtype=torch.float16, device=device)
    shifted = spread[1:].view(70, 1104)  # 2 bytes past an aligned address
    shifted.copy_(weight)
    assert torch.equal(product(x, shifted), product(x, weight))


def test_refusals(device: torch.device) -> None:
    x, weight, _ = operands(3, 70, 1100, torch.float16, device)
    out = torch.empty(3, 70, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="workspace"):
        invariant_linear_(x, weight, None, out, GemmWorkspace(device, floats=0, counters=0))
    with pytest.raises(ValueError, match="fit"):
        invariant_linear_(x[:, :-1], weight, None, out, GemmWorkspace(device, floats=0, counters=0))
    invariant_linear_(x[:0], weight, None, out[:0], GemmWorkspace(device, floats=0, counters=0))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096), (4104, 4100)])
def test_large(n: int, k: int, device: torch.device) -> None:
    """bf16 at a model's sizes: right, and the same bits at 1 row, 200, and 8192."""
    generator = torch.Generator(device).manual_seed(n)
    x = torch.randn(8192, k, device=device, generator=generator).bfloat16()
    weight = (torch.randn(n, k, device=device, generator=generator) / k**0.5).bfloat16()
    every = product(x, weight)
    relative, absolute = TOLERANCES[torch.bfloat16]
    expected = x[:512].float() @ weight.float().T
    torch.testing.assert_close(every[:512].float(), expected, rtol=relative, atol=absolute)
    for first, last in ((0, 1), (5, 6), (300, 500), (8000, 8192), (0, 1000), (17, 4000)):
        assert torch.equal(product(x[first:last], weight), every[first:last])
