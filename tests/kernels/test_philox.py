import math

import pytest
import torch

from twostroke.kernels.philox import gumbel_noise, philox4x32


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([v]) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123 1.14, "philox4x32 10"
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, expected):
    assert tuple(int(w) for w in philox4x32(words(*counter), words(*key))) == expected


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        p0, p1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [p1 >> 32 ^ counter[1] ^ key[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ counter[3] ^ key[1], p0 & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_many_words_in_any_shape_equal_plain_integers():
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 1 << 32, (6, 5, 7), generator=generator)
    result = philox4x32(tuple(data[:4]), tuple(data[4:]))
    assert all(r.shape == (5, 7) for r in result)
    for i in range(5):
        for j in range(7):
            column = data[:, i, j].tolist()
            assert [int(r[i, j]) for r in result] == slow_philox(column[:4], column[4:])


def test_noise_is_a_function_of_its_arguments_alone():
    seeds = torch.tensor([1, -5, 1 << 40, 1])
    samples, positions = torch.tensor([0, 0, 2, 1]), torch.tensor([7, 9, 7, 7])
    indices = torch.arange(100)
    together = gumbel_noise(seeds, samples, positions, 0, indices)
    for i in range(4):
        row = slice(i, i + 1)
        assert torch.equal(gumbel_noise(seeds[row], samples[row], positions[row], 0, indices), together[row])
    some = torch.tensor([[3, 99, 0]]).expand(4, 3)
    assert torch.equal(gumbel_noise(seeds, samples, positions, 0, some), together[:, [3, 99, 0]])


def test_noise_uses_the_counter_and_both_halves_of_the_seed():
    def first(seed: int, sample: int, position: int, stream: int, index: int) -> int:
        u = gumbel_noise(*(torch.tensor([v]) for v in (seed, sample, position)), stream, torch.tensor([index]))
        return round(math.exp(-math.exp(-u.item())) * 2**32 - 0.5)

    seed = 0x123456789ABCDEF0
    expected = slow_philox([11, 1, 5, 2], [seed & 0xFFFFFFFF, seed >> 32])[0]
    assert first(seed, 2, 5, 1, 11) == pytest.approx(expected, abs=2)
    others = [(seed + 1, 2, 5, 1, 11), (seed ^ 1 << 33, 2, 5, 1, 11), (seed, 3, 5, 1, 11), (seed, 2, 6, 1, 11)]
    others += [(seed, 2, 5, 0, 11), (seed, 2, 5, 1, 12)]
    assert len({first(*o) for o in others} | {expected}) == 7


def test_noise_is_standard_gumbel():
    row = torch.zeros(1, dtype=torch.int64)
    noise = gumbel_noise(row + 42, row, row, 0, torch.arange(200_000))[0]
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    distance = (uniform - (torch.arange(200_000) + 0.5) / 200_000).abs().max().item()
    assert distance < 1.63 / math.sqrt(200_000)  # Kolmogorov-Smirnov, 1%


def test_extreme_words_give_finite_noise():
    for bits in (0, 0xFFFFFFFF):
        uniform = torch.tensor((bits + 0.5) * 2.0**-32, dtype=torch.float64)
        assert torch.isfinite(-(-uniform.log()).log())
