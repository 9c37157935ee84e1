"""Large anonymous memory is found, put on huge pages where the kernel can, and keeps its content."""

import torch

from twostroke.engine.huge_pages import HUGE, _large_anonymous, use_huge_pages

MAPS = """\
55d000000000-55d000400000 rw-p 00000000 00:00 0                          [heap]
7f0000001000-7f0000a00000 rw-p 00000000 00:00 0
7f0000a00000-7f0000b00000 rw-p 00000000 00:00 0
7f0010000000-7f0020000000 r--p 00000000 08:01 77                         /model.safetensors
7f0030000000-7f0040000000 rw-s 00000000 00:19 12                         /dev/shm/pool
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_whole_huge_pages_of_private_memory_without_a_file() -> None:
    assert list(_large_anonymous(MAPS)) == [
        (0x55D000000000, 0x55D000400000),
        (0x7F0000200000, 0x7F0000A00000),
    ]


def test_content_stays() -> None:
    big = torch.arange(4 * HUGE, dtype=torch.int32)
    asked = use_huge_pages()
    assert asked == 0 or asked >= 4 * HUGE
    assert torch.equal(big, torch.arange(4 * HUGE, dtype=torch.int32))
