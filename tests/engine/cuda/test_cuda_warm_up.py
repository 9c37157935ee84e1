"""What is run before serving: nothing may be left that a step would have to compile."""

import json

import pytest
import torch

from twostroke.engine.config import EngineOptions
from twostroke.engine.cuda.warm_up import _steps
from twostroke.engine.footprint import HEAD_ROWS, graph_sizes
from twostroke.kernels.gpu.gemm import Config
from twostroke.kernels.gpu.gemm_table import PACKAGED, GemmTable, read_entries

HEAD = (128256, 4096)
ENTRIES = read_entries(json.loads(PACKAGED.read_text()))
SHAPES = sorted({(entry.n, entry.k) for entry in ENTRIES})
TABLE = GemmTable(ENTRIES, pdl=True, prefetch=2)


def compiled(shape: tuple[int, int], rows: int) -> tuple[object, ...] | None:
    """What a product of so many rows is compiled for: all of its choice but the number of programs."""
    config: Config | None = TABLE.choose(rows, *shape, torch.bfloat16)
    if config is None:
        return None
    return (config.block_m, config.block_n, config.block_k, config.num_warps, config.num_stages, config.flat,
            config.tma, config.prefetch)  # fmt: skip


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize(
    ("max_batch", "token_budget", "context"),
    [
        (0, 0, 131072),
        (1, 16, 2048),
        (5, 100, 2048),
        (24, 2048, 512),
        (100, 300, 8192),
        (200, 201, 100),
        (250, 0, 4096),
        (4, 20, 10),
    ],
)
def test_every_product_of_the_table_is_compiled(
    max_batch: int, token_budget: int, context: int, cuda_graphs: bool
) -> None:
    options = EngineOptions(device="cuda", max_batch=max_batch, token_budget=token_budget, cuda_graphs=cuda_graphs)
    layers, head = set(graph_sizes(options)), set(graph_sizes(options))
    for rows in _steps(options, context, 100):
        tokens, drawn = sum(len(row.token_ids) for row in rows), sum(row.sample for row in rows)
        assert tokens <= options.token_budget
        assert len(rows) <= options.max_batch
        assert sum(row.samples for row in rows if row.sample) <= options.max_batch
        assert all(row.start + len(row.token_ids) <= context for row in rows)
        scored = sum(len(row.scoring.targets) for row in rows if row.scoring is not None)
        layers |= {tokens, drawn + scored}
        head |= {drawn, min(scored, HEAD_ROWS)}
    for shape in SHAPES:
        scored_at_once = min(HEAD_ROWS, options.token_budget - 1, context - 1)
        most = max(options.max_batch, scored_at_once) if shape == HEAD else options.token_budget
        run = head if shape == HEAD else layers
        ready = {compiled(shape, rows) for rows in run if rows}
        late = {rows: key for rows in range(1, most + 1) if (key := compiled(shape, rows)) not in ready}
        assert not late, (shape, late)
