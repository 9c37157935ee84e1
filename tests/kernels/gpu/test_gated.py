import pytest
import torch
from torch.nn import functional

from twostroke.kernels.gpu.gated import gated, soft_cap_
from twostroke.kernels.tolerances import TOLERANCES

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # a sigmoid's, near 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inner"),
    [(1, 1536), (3, 2304), (2, 14336), (33, 48), pytest.param(513, 16, marks=pytest.mark.slow)],
)
def test_equals_the_gate_in_float64(device, activation, dtype, rows, inner):
    generator = torch.Generator().manual_seed(inner)
    gate_up = (torch.randn(rows, 2 * inner, generator=generator) * 4).to(dtype)
    out = torch.full((rows + 1, inner), torch.nan, dtype=dtype, device=device)
    gated(gate_up.to(device), out[:rows], activation)
    gate, up = gate_up.double().chunk(2, dim=-1)
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(out[:rows].cpu().double(), act * up, rtol=relative, atol=absolute)
    assert out[rows].isnan().all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_far_out_neither_overflow_nor_vanish(device, activation):
    gate = torch.tensor([-300.0, -90.0, -1e-6, 0.0, 1e-6, 90.0, 300.0, 3e4])
    gate_up = torch.cat((gate, torch.ones(8))).unsqueeze(0)
    out = torch.empty(1, 8, device=device)
    gated(gate_up.to(device), out, activation)
    wide = gate.double()
    expected = functional.silu(wide) if activation == "silu" else functional.gelu(wide, approximate="tanh")
    torch.testing.assert_close(out[0].cpu().double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (3, 2049), (2, 5000)])
def test_soft_cap_in_place(device, dtype, shape):
    logits = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 40).to(dtype)
    logits[0, :3] = torch.tensor([torch.inf, -torch.inf, 0.0])
    capped = torch.cat((logits, torch.full_like(logits, torch.nan))).to(device)
    soft_cap_(capped[: shape[0]], 30.0)
    relative, absolute = TOLERANCES[dtype]
    expected = 30 * torch.tanh(logits.double() / 30)
    torch.testing.assert_close(capped[: shape[0]].cpu().double(), expected, rtol=relative, atol=absolute)
    assert capped[shape[0] :].isnan().all()


@pytest.mark.gpu
def test_more_than_2_31_elements(device):
    rows, inner = 80_000, 14336
    gate_up = torch.zeros(rows, 2 * inner, dtype=torch.bfloat16, device=device)
    gate_up[-1] = 3.0
    out = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)
    gated(gate_up, out, "silu")
    torch.testing.assert_close(out[-1].float(), torch.full((inner,), 8.5732, device=device), rtol=1e-2, atol=0)
    assert not out[0].any()
    soft_cap_(gate_up, 1.0)
    assert (gate_up[-1] > 0.99).all()
