"""Logits under masks: what a bit allows stays as it is, everything else is -inf; against the plain reference."""

import numpy as np
import pytest
import torch

from twostroke.kernels.gpu.draw import DrawScratch, draw_greedy
from twostroke.kernels.gpu.mask import mask_logits
from twostroke.kernels.logit_masks import allow_bits_

INF, NAN = float("inf"), float("nan")


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """bool [masks, vocab] to int32 [masks, ceil(vocab / 32)]; the bits beyond the vocabulary are 0."""
    masks, vocab = allowed.shape
    padded = np.zeros((masks, -(-vocab // 32) * 32), np.uint8)
    padded[:, :vocab] = allowed.numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 300, 4096, 4097, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_and_without_masks(vocab, dtype, device):
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.randn(5, vocab + 7, generator=generator).to(dtype)
    wide[1, 0] = NAN
    logits = wide.to(device)[:, :vocab]
    allowed = torch.rand(3, vocab, generator=generator) < 0.4
    allowed[1] = False
    allowed[2, vocab - 1] = True
    places = [1, -1, 0, 2, -1]
    expected = logits.cpu().clone()
    rows = [row for row, place in enumerate(places) if place >= 0]
    words = packed(allowed)
    allow_bits_(expected, torch.tensor(rows), words[[places[row] for row in rows]])
    for row, place in enumerate(places):
        if place >= 0:
            assert (expected[row] == -INF).tolist() == (~allowed[place]).tolist()
    out = torch.full((6, vocab), 9.0, dtype=dtype, device=device)
    mask_logits(logits, torch.tensor(places, dtype=torch.int32, device=device), words.to(device), out[:5])
    torch.testing.assert_close(out[:5].cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert (out[5] == 9.0).all()


def test_the_token_of_a_masked_row(device):
    logits = torch.zeros(3, 500, device=device)
    logits[:, 7] = 5.0
    allowed = torch.zeros(2, 500, dtype=torch.bool)
    allowed[0, [300, 499]] = True
    out, tokens = torch.empty_like(logits), torch.zeros(3, dtype=torch.int64, device=device)
    mask_logits(logits, torch.tensor([0, 1, -1], dtype=torch.int32, device=device), packed(allowed).to(device), out)
    draw_greedy(out, tokens, DrawScratch(3, 500, logits.device))
    assert tokens.tolist() == [300, -1, 7], "nothing allowed: no token"


def test_no_rows(device):
    empty = torch.zeros(0, 64, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    mask_logits(empty, none, torch.zeros(0, 2, dtype=torch.int32, device=device), empty)
