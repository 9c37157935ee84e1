"""Log-probabilities against torch's log_softmax and a stable sort."""

import pytest
import torch
from torch import Tensor

from twostroke.kernels.gpu.draw import DrawScratch
from twostroke.kernels.gpu.logprobs import logprobs

INF, NAN = float("inf"), float("nan")


def found(logits: Tensor, tokens: list[int], top: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    wide = torch.full((rows, vocab + 8), NAN, dtype=logits.dtype, device=device)
    wide[:, :vocab] = logits.to(device)
    values = torch.full((rows, 4 + top), NAN, device=device)
    ids = torch.full((rows, 3 + top), -9, dtype=torch.int64, device=device)
    scratch = DrawScratch(rows, vocab, device)
    drawn = torch.tensor(tokens, device=device)
    logprobs(wide[:, :vocab], drawn, top, values[:, : 1 + top], ids[:, : 1 + top], scratch)
    assert values[:, 1 + top :].isnan().all()
    assert (ids[:, 1 + top :] == -9).all()
    return values[:, : 1 + top].cpu(), ids[:, : 1 + top].cpu()


@pytest.mark.parametrize(("vocab", "top"), [(1, 0), (1, 3), (5, 4), (257, 5), (1000, 20), (4500, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chosen_and_the_likeliest(vocab, top, dtype, device):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(3, vocab, generator=generator) * 3).to(dtype)
    logits[2] = logits[2].round()  # equals everywhere
    tokens = torch.randint(vocab, (3,), generator=generator).tolist()
    values, ids = found(logits, tokens, top, device)
    expected = logits.double().log_softmax(dim=1)
    order = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :top]
    count = order.shape[1]
    assert ids[:, 0].tolist() == tokens
    assert torch.equal(ids[:, 1 : 1 + count], order)
    assert torch.allclose(
        values[:, : 1 + count].double(), expected.gather(1, ids[:, : 1 + count]), atol=2e-6, rtol=1e-6
    )
    assert (ids[:, 1 + count :] == -1).all()
    assert (values[:, 1 + count :] == -INF).all()


def test_impossible_logits_and_no_token(device):
    logits = torch.zeros(4, 600)
    logits[0, 300], logits[0, 5], logits[0, 7] = NAN, INF, -INF
    logits[1] = -INF
    logits[2] = NAN
    logits[3, 1:] = -INF
    values, ids = found(logits, [5, -1, 9, 0], 2, device)
    assert ids.tolist() == [[5, 0, 1], [-1, -1, -1], [9, 0, 1], [0, 0, -1]]
    even = -torch.tensor(600.0).log().item()
    assert values[0, 0] < -1e38
    assert values[0, 1:].tolist() == pytest.approx([-torch.tensor(597.0).log().item()] * 2)
    assert values[1].tolist() == [-INF] * 3
    assert values[2].tolist() == pytest.approx([even] * 3)
    assert values[3].tolist() == [0.0, 0.0, -INF]
