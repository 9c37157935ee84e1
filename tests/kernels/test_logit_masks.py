import torch

from twostroke.kernels.logit_masks import add_bias_, allow_only_, forbid_

INF = float("inf")


def test_bias_is_added_where_it_is_named() -> None:
    logits = torch.zeros(3, 4)
    logits[2, 1] = -INF
    add_bias_(logits, torch.tensor([0, 0, 2, 2]), torch.tensor([3, 1, 1, 0]), torch.tensor([1.5, -2.0, 9.0, 4.0]))
    assert logits.tolist() == [[0, -2, 0, 1.5], [0, 0, 0, 0], [4, -INF, 0, 0]]


def test_forbidden_tokens_are_impossible() -> None:
    logits = torch.arange(8.0).view(2, 4)
    forbid_(logits, torch.tensor([1, 0, 1]), torch.tensor([3, 0, 3]))
    assert logits.tolist() == [[-INF, 1, 2, 3], [4, 5, 6, -INF]]


def test_only_allowed_tokens_stay_in_the_rows_that_name_some() -> None:
    logits = torch.arange(12.0).view(3, 4)
    allow_only_(logits, torch.tensor([2, 0, 2, 2]), torch.tensor([1, 3, 0, 1]))
    assert logits.tolist() == [[-INF, -INF, -INF, 3], [4, 5, 6, 7], [8, 9, -INF, -INF]]
