import pytest
import torch

from twostroke.kernels.digest import pool_digests
from twostroke.kernels.gpu.page_digest import digest_pages


def digests(pool: torch.Tensor, ids: list[int], device, id_dtype=torch.int32, **salt: int) -> bytes:
    out = torch.zeros(len(pool), len(ids), dtype=torch.int64, device=device)
    digest_pages(pool.to(device), torch.tensor(ids, dtype=id_dtype, device=device), out, **salt)
    return out.cpu().numpy().astype("<i8").tobytes()


@pytest.mark.parametrize("ticket", [0, 1, 16, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("page_bytes", [8, 2 * 2 * 16 * 80, 32768, 3 * 32768 + 8])
def test_bit_for_bit_those_of_the_host(device, ticket, page_bytes):
    generator = torch.Generator().manual_seed(page_bytes)
    pool = torch.randint(0, 256, (3, 6, page_bytes), generator=generator, dtype=torch.uint8)
    ids = [5, 0, 3, 3]
    salt = {"ticket": ticket, "first_layer": 7, "ordinal": 1000}
    assert digests(pool, ids, device, **salt) == pool_digests(pool, ids, **salt)


@pytest.mark.parametrize("aligned", [True, False])
def test_again_by_what_was_compiled(device, aligned):
    """On a GPU the second launch goes another way than the first; a pool that begins within 16 bytes goes its own."""
    memory = torch.randint(0, 256, (2 * 6 * 96 + 8,), dtype=torch.uint8, device=device)
    pool = memory[0 if aligned else 8 :][: 2 * 6 * 96].view(2, 6, 96)
    for ticket in (7, 8, 1 << 40):
        salt = {"ticket": ticket, "first_layer": 3, "ordinal": ticket % 5}
        assert digests(pool, [5, 1, 4], device, **salt) == pool_digests(pool.cpu(), [5, 1, 4], **salt)


def test_a_pool_of_floats_and_long_ids(device):
    pool = torch.randn(2, 4, 2, 3, 16, 64, generator=torch.Generator().manual_seed(3)).half()
    salt = {"ticket": 77, "first_layer": 0, "ordinal": 0}
    expected = pool_digests(pool.view(torch.uint8).view(2, 4, -1), [1, 2], **salt)
    assert digests(pool, [1, 2], device, torch.int64, **salt) == expected
    assert digests(pool[1:], [1, 2], device, **{**salt, "first_layer": 1}) == expected[16:]


def test_no_page_and_no_layer(device):
    out = torch.full((2, 0), 1, dtype=torch.int64, device=device)
    pool = torch.zeros(2, 2, 16, device=device)
    digest_pages(pool, torch.zeros(0, dtype=torch.int32, device=device), out, ticket=1, first_layer=0, ordinal=0)
    kept = torch.full((0, 1), 1, dtype=torch.int64, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    digest_pages(pool[:0], one, kept, ticket=1, first_layer=0, ordinal=0)


def test_nothing_beside_the_digests_is_written(device):
    pool = torch.zeros(1, 2, 64, device=device)
    out = torch.full((3, 2), -1, dtype=torch.int64, device=device)
    digest_pages(
        pool, torch.tensor([1, 0], dtype=torch.int32, device=device), out[1:2], ticket=1, first_layer=0, ordinal=0
    )
    assert (out[0::2] == -1).all()
    assert (out[1] != -1).all()


@pytest.mark.gpu
def test_pages_of_an_8b_model_beyond_2_31_words(device):
    page_bytes = 2 * 8 * 64 * 128 * 2
    pages = 2**34 // page_bytes + 3
    pool = torch.empty(2, pages, page_bytes, dtype=torch.uint8, device=device)
    ids = [pages - 1, 0, pages - 2]
    pool[:, ids] = torch.randint(0, 256, (2, 3, page_bytes), dtype=torch.uint8, device=device)
    salt = {"ticket": 2**40 + 1, "first_layer": 3, "ordinal": 12}
    assert digests(pool, ids, device, **salt) == pool_digests(pool[:, ids].cpu(), [0, 1, 2], **salt)
