import pytest
import torch

from twostroke.kernels.kv_write import kv_rows, write_kv_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "page_size", "head_dim"), [(1, 16, 64), (3, 16, 64), (8, 32, 80), (2, 128, 2)])
def test_each_token_lands_in_its_slot_and_nothing_else_changes(kv_heads, page_size, head_dim, dtype):
    generator = torch.Generator().manual_seed(kv_heads)
    pages = 5
    pool = torch.randn(pages, 2, kv_heads, page_size, head_dim, generator=generator).to(dtype)
    expected = pool.clone()
    slots = torch.randperm(pages * page_size, generator=generator)[:13]
    wide = torch.randn(13, 7 + 2 * kv_heads * head_dim, generator=generator).to(dtype)
    kv = wide[:, 7:]  # strided, as a slice of the fused projection is
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        expected[page, :, :, offset] = kv[token].view(2, kv_heads, head_dim)
    write_kv_(pool.view(-1, head_dim), kv_rows(slots, kv_heads, page_size), kv)
    assert torch.equal(pool, expected)


def test_rows_do_not_overflow_32_bits():
    slots = torch.tensor([(1 << 33) + 5])
    assert kv_rows(slots, 1, 16).tolist() == [(1 << 34) + 5, (1 << 34) + 5 + 16]


def test_no_tokens():
    pool = torch.ones(32, 4)
    write_kv_(pool, kv_rows(torch.zeros(0, dtype=torch.int64), 1, 16), torch.zeros(0, 8))
    assert torch.equal(pool, torch.ones(32, 4))
