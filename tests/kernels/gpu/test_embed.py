import pytest
import torch

from twostroke.kernels.gpu.embed import embed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 2304), (33, 80), (2, 5120)])
def test_rows_of_the_matrix_scaled(device, dtype, rows, width):
    generator = torch.Generator().manual_seed(width)
    embedding = torch.randn(97, width, generator=generator).to(dtype)
    tokens = torch.randint(0, 97, (rows,), generator=generator)
    tokens[0] = 96
    for ids in (tokens.to(torch.int32), tokens):
        hidden = torch.full((rows, width), torch.nan, device=device)
        embed(
            ids.to(device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            embedding.to(device),
            hidden,
            1.5,
        )
        assert torch.equal(hidden.cpu(), embedding[tokens].float() * 1.5)


def test_tokens_unknown_to_the_host_are_those_drawn_last(device):
    embedding = torch.randn(11, 48, generator=torch.Generator().manual_seed(0))
    last_tokens = torch.tensor([0, 10, 1 << 40, 4], device=device)  # slot 2's is not asked for
    hidden = torch.full((5, 48), torch.nan, device=device)
    embed(
        torch.tensor([-1, 3, -1, 7, -1], dtype=torch.int32, device=device),
        torch.tensor([1, 2, 3, 2, 0], dtype=torch.int32, device=device),
        last_tokens,
        embedding.to(device),
        hidden,
        1.0,
    )
    assert torch.equal(hidden.cpu(), embedding[[10, 3, 4, 7, 0]])


def test_where_nothing_was_drawn_nothing_outside_the_matrix_is_read(device):
    """The row is void, but it is computed: its sequence's failure is not known yet."""
    embedding = torch.full((12, 48), torch.nan, device=device)
    embedding[1:] = torch.randn(11, 48, generator=torch.Generator().manual_seed(0))
    hidden = torch.full((1, 48), torch.nan, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    embed(-one, one, torch.tensor([0, -1], device=device), embedding[1:], hidden, 1.0)
    assert torch.equal(hidden, embedding[1:2])


@pytest.mark.gpu
def test_a_matrix_of_more_than_2_31_elements(device):
    rows, width = 270_000, 8192
    embedding = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    tokens = torch.tensor([rows - 1, 0, 262_145], dtype=torch.int32, device=device)
    embedding[tokens.long()] = torch.randn(3, width, device=device).bfloat16()
    hidden = torch.empty(3, width, device=device)
    embed(tokens, torch.zeros_like(tokens), torch.zeros(1, dtype=torch.int64, device=device), embedding, hidden, 1.0)
    assert torch.equal(hidden, embedding[tokens.long()].float())
