"""What a program of a kernel takes that stays on its multiprocessor: items (tile, head block), the longest first.

Rounds go up and down the programs in turn, so that all get about the same work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def item_count(items):
    """How many of `items` this program takes."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    rounds = items // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + (place < items % programs).to(gl.int32)


@gluon.jit
def item(tiles, i, taken, head_blocks: gl.constexpr):
    """The i-th one that this program takes: head block, slot, first token, tokens, position."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    number = i * programs + gl.where(i % 2 == 0, program, programs - 1 - program)
    tile, there = tiles + number // head_blocks * 4, i < taken  # one ahead of the last: anything
    slot, first_token = gl.load(tile, mask=there, other=0), gl.load(tile + 1, mask=there, other=0)
    count, start = gl.load(tile + 2, mask=there, other=0), gl.load(tile + 3, mask=there, other=0)
    return number % head_blocks, slot, first_token, count, start


@gluon.jit
def tile_keys(count, start, block: gl.constexpr, window: gl.constexpr):
    """The first key that a tile reads, on the grid of blocks, and the end. One of no tokens runs as if it had one."""
    origin = gl.to_tensor(0)
    if window > 0:
        origin = gl.maximum(start + 1 - window, 0) // block * block
    return origin, start + gl.maximum(count, 1)
