import pytest
import torch

from twostroke.kernels.gpu.page_copy import copy_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("inner", [(2, 8, 64, 128), (2, 3, 16, 64), (2, 1, 16, 80), (2, 2, 32, 96)])
def test_whole_pages_of_all_layers(device, dtype, inner):
    generator = torch.Generator().manual_seed(1)
    pool = torch.randint(-(2**15), 2**15, (3, 7, *inner), generator=generator, dtype=torch.int16)
    pool = pool.view(torch.bfloat16).to(dtype)  # NaN and denormal numbers among them
    pairs = [(2, 1), (2, 6), (4, 3), (0, 0)]
    expected = pool.view(torch.uint8).clone()
    for source, target in pairs:
        expected[:, target] = expected[:, source]
    copied = pool.to(device)
    copy_pages(copied, torch.tensor(pairs, dtype=torch.int32, device=device))
    assert torch.equal(copied.cpu().view(torch.uint8), expected)


def test_some_layers_of_a_pool_and_no_pairs(device):
    pool = torch.arange(4 * 3 * 16, dtype=torch.float32, device=device).view(4, 3, 2, 8)
    before = pool.clone()
    copy_pages(pool, torch.zeros(0, 2, dtype=torch.int32, device=device))
    assert torch.equal(pool, before)
    copy_pages(pool[1:3], torch.tensor([(0, 2)], dtype=torch.int32, device=device))
    before[1:3, 2] = before[1:3, 0]
    assert torch.equal(pool, before)


@pytest.mark.gpu
def test_a_pool_of_more_than_2_31_words(device):
    inner = (2, 8, 64, 128)
    pages = 2**35 // (2 * 2 * 8 * 64 * 128 * 2) + 5
    pool = torch.empty(2, pages, *inner, dtype=torch.bfloat16, device=device)
    pool[:, -1] = torch.randn(2, *inner, device=device)
    copy_pages(pool, torch.tensor([(pages - 1, 1), (pages - 1, pages - 2)], dtype=torch.int32, device=device))
    assert torch.equal(pool[:, 1], pool[:, -1])
    assert torch.equal(pool[:, -2], pool[:, -1])
