"""The configurations that `gpu_gemm.py` tries: few, and spread over what may limit a product with few rows."""

from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.kernels.gpu.gemm import Config, ceil_div

SMS = 132
SHARED = 232_448  # bytes of shared memory that a program may have; a multiprocessor's have 233,472 and lose 1 KiB each
SCRATCH = 32_768  # of it, for a finished tile on its way out; the loop over whole shares needs it beside its blocks
MOST_STAGES = 6


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks of a weight, and how many programs a multiprocessor is to hold."""

    n: int
    k: int
    warps: int
    residents: int


SMALL = (
    Tile(64, 128, 4, 2),
    Tile(64, 256, 4, 1),
    Tile(128, 128, 4, 1),
    Tile(64, 128, 4, 3),
    Tile(128, 64, 4, 2),
    Tile(128, 256, 8, 1),
    Tile(64, 64, 4, 4),
)
TILES: dict[int, tuple[Tile, ...]] = {  # by rows of x a block
    8: (Tile(64, 128, 4, 2), Tile(64, 256, 4, 2)),
    16: SMALL,
    32: (Tile(64, 128, 4, 2), Tile(128, 64, 4, 2), Tile(128, 128, 8, 1)),
    64: (Tile(64, 128, 4, 2), Tile(128, 64, 4, 2), Tile(128, 128, 8, 1), Tile(256, 64, 8, 1)),
    128: (Tile(64, 64, 4, 2), Tile(128, 64, 8, 1), Tile(128, 64, 4, 1), Tile(256, 64, 8, 1)),
    256: (Tile(64, 64, 4, 1), Tile(128, 64, 8, 1)),
}
GEMV = (
    (2, 2048, 4, 1),
    (4, 1024, 4, 1),
    (8, 512, 4, 1),
    (8, 1024, 4, 1),
    (8, 512, 4, 3),
    (4, 1024, 4, 3),
    (1, 2048, 2, 1),
)


def block_rows(m: int) -> tuple[int, ...]:
    """Sensible rows of x a block for a batch of `m`."""
    if m <= 16:
        return (16, 8) if m <= 8 else (16,)
    least = min(256, 1 << (m - 1).bit_length())
    return {32: (32,), 64: (64,), 128: (128, 64), 256: (256, 128, 64)}[least]


def candidates(m: int, n: int, k: int) -> list[Config]:
    """For x [m, k] and a weight [n, k], the likely best first."""
    found = [Config(1, *tile[:2], programs=0, num_warps=tile[2], num_stages=tile[3]) for tile in GEMV if m == 1]
    for rows in block_rows(m):
        for tile in TILES[rows]:
            found += _variants(m, n, rows, tile)
    return list(dict.fromkeys(found))


def _variants(m: int, n: int, rows: int, tile: Tile) -> Iterator[Config]:
    room = (SHARED + 1024) // tile.residents - 1024
    block = (rows + tile.n) * tile.k * 2
    wide = rows >= 128
    for flat in (True, False) if wide else (True,):
        scratch = min(rows * tile.n * 2, SCRATCH) if flat else 0
        stages = min(MOST_STAGES, (room - scratch) // block)
        if stages < 2:
            continue
        for programs in _programs(m, n, rows, tile):
            for tma in (True,) if wide else (True, False):
                yield Config(rows, tile.n, tile.k, programs, tile.warps, stages, flat=flat, tma=tma)


def _programs(m: int, n: int, rows: int, tile: Tile) -> list[int]:
    """Equal shares for every multiprocessor; whole tiles, several waves of them; and an equal cut of every tile."""
    width, tiles = ceil_div(m, rows), ceil_div(n, tile.n)
    places = SMS * tile.residents // width
    if tiles > places:
        return [places, tiles] if tiles > 2 * places else [places]
    cut = max(1, round(places / tiles))
    return list(dict.fromkeys([places, tiles * cut]))
