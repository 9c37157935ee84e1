import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.add_norm import add_norm
from twostroke.kernels.tolerances import TOLERANCES

EPS = 1e-5


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In float64."""
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def check(device, dtype, rows: int, width: int, *, with_delta: bool = True, with_post: bool = False) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    hidden = torch.randn(rows, width, generator=generator) * 3
    delta = torch.randn(rows, width, generator=generator).to(dtype) if with_delta else None
    weight, post = torch.rand(2, width, generator=generator) + 0.5
    guarded = torch.full((rows + 1, width), torch.nan)  # the row behind the last is no one's
    guarded[:rows] = hidden
    stream = guarded.to(device)
    out = torch.full((rows + 1, width), torch.nan, dtype=dtype, device=device)
    add_norm(
        stream[:rows],
        None if delta is None else delta.to(device),
        weight.to(device),
        EPS,
        out[:rows],
        post.to(device) if with_post else None,
    )
    expected = hidden.double()
    if delta is not None:
        expected = expected + (rms_norm(delta.double(), post) if with_post else delta.double())
    torch.testing.assert_close(stream[:rows].cpu().double(), expected, rtol=1e-5, atol=1e-5)
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(out[:rows].cpu().double(), rms_norm(expected, weight), rtol=relative, atol=absolute)
    assert out[rows].isnan().all()
    assert stream[rows].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 576), (3, 2304), (2, 3072), (2, 4096), (2, 5120), (1, 16384), (65, 80)]
)
def test_equals_the_norm_of_the_sum(device, dtype, rows, width):
    check(device, dtype, rows, width)


@pytest.mark.parametrize("width", [576, 3072])
def test_without_a_delta_the_stream_is_left(device, width):
    check(device, torch.float16, 3, width, with_delta=False)


@pytest.mark.parametrize("width", [576, 2304])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_delta_with_a_norm_of_its_own(device, dtype, width):
    check(device, dtype, 3, width, with_post=True)


def test_many_rows(device):
    check(device, torch.float16, 513, 96)


def test_rows_of_zeros_give_zeros_and_a_bad_row_stays_alone(device):
    hidden = torch.zeros(3, 80, device=device)
    hidden[1] = torch.nan
    hidden[2] = 1.0
    out = torch.empty(3, 80, dtype=torch.float16, device=device)
    add_norm(hidden, torch.zeros_like(out), torch.ones(80, device=device), EPS, out)
    assert torch.equal(out[0].cpu(), torch.zeros(80, dtype=torch.float16))
    assert out[1].isnan().all()
    assert torch.equal(out[2].cpu(), torch.ones(80, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [576, 2304, 3072, 4096, 5120, 8192, 16384])
def test_a_row_does_not_depend_on_the_others(device, width):
    hidden = torch.randn(513, width, device=device)
    delta = torch.randn(513, width, device=device).bfloat16()
    weight = torch.rand(width, device=device)
    whole, alone = torch.empty_like(delta), torch.empty_like(delta)
    stream = hidden.clone()
    add_norm(stream, delta, weight, EPS, whole)
    for row in (0, 255, 512):
        single = hidden[row : row + 1].clone()
        add_norm(single, delta[row : row + 1], weight, EPS, alone[row : row + 1])
        assert torch.equal(single[0], stream[row])
        assert torch.equal(alone[row], whole[row])


@pytest.mark.gpu
def test_a_stream_of_more_than_2_31_elements(device):
    rows, width = 262_145, 8192
    hidden = torch.ones(rows, width, device=device)
    out = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    add_norm(hidden, None, torch.full((width,), 2.0, device=device), EPS, out)
    assert (out[-1] == 2).all()
    assert (out[0] == 2).all()
