import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from twostroke.kernels.rope import rope_angles, rope_frequencies, rotate_
from twostroke.kernels.tolerances import TOLERANCES


@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_transformers_in_place_and_leaves_the_rest(head_dim, dtype):
    generator = torch.Generator().manual_seed(head_dim)
    positions = torch.tensor([0, 1, 17, 8191, 100_000])
    block = torch.randn(5, 7, head_dim, generator=generator).to(dtype)
    before = block.clone()
    cos, sin = rope_angles(positions, rope_frequencies(10_000.0, head_dim))
    rotate_(block[:, 1:5], cos, sin)
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.cat((torch.outer(positions.float(), frequencies),) * 2, dim=-1)
    heads = before[:, 1:5].transpose(0, 1).unsqueeze(0).double()
    expected, _ = apply_rotary_pos_emb(heads, heads, angles.cos().double()[None], angles.sin().double()[None])
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(
        block[:, 1:5].double(), expected[0].transpose(0, 1), rtol=relative, atol=absolute, check_dtype=False
    )
    assert torch.equal(block[:, 0], before[:, 0])
    assert torch.equal(block[:, 5:], before[:, 5:])


def test_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, generator=generator)
    frequencies = rope_frequencies(100_000.0, 64)

    def score(at_q: int, at_k: int) -> float:
        rotated = []
        for x, at in ((q, at_q), (k, at_k)):
            y = x.clone()
            rotate_(y, *rope_angles(torch.tensor([at]), frequencies))
            rotated.append(y)
        return (rotated[0] * rotated[1]).sum().item()

    assert score(5, 3) == pytest.approx(score(1005, 1003), abs=1e-3)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-2)


def test_a_part_of_a_head_is_rotated_and_the_rest_is_left():
    block = torch.randn(3, 2, 96, generator=torch.Generator().manual_seed(1))
    whole, before = block[..., :64].clone(), block.clone()
    angles = rope_angles(torch.tensor([0, 5, 900]), rope_frequencies(10_000.0, 64))
    rotate_(block[..., :64], *angles)
    rotate_(whole, *angles)
    assert torch.equal(block[..., :64], whole)
    assert torch.equal(block[..., 64:], before[..., 64:])


def test_angles_are_scaled():
    positions, frequencies = torch.tensor([0, 7]), rope_frequencies(10_000.0, 8)
    cos, sin = rope_angles(positions, frequencies)
    scaled_cos, scaled_sin = rope_angles(positions, frequencies, 1.25)
    torch.testing.assert_close(scaled_cos, cos * 1.25)
    torch.testing.assert_close(scaled_sin, sin * 1.25)
