import torch

from twostroke.kernels.scratch import Scratch


def test_buffers_are_kept_and_grow():
    scratch = Scratch()
    first = scratch.take("a", (4, 8), torch.float32)
    assert first.shape == (4, 8)
    assert first.is_contiguous()
    smaller = scratch.take("a", (3, 5), torch.float32)
    assert smaller.data_ptr() == first.data_ptr()
    assert scratch.take("a", (100, 8), torch.float32).shape == (100, 8)
    assert scratch.take("a", (0, 8), torch.float32).numel() == 0


def test_names_and_types_do_not_share():
    scratch = Scratch()
    a = scratch.take("a", (16,), torch.float32).fill_(1.0)
    scratch.take("b", (16,), torch.float32).fill_(2.0)
    scratch.take("a", (16,), torch.bfloat16).fill_(3.0)
    assert a.tolist() == [1.0] * 16
