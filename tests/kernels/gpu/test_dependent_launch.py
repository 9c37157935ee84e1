"""Kernels that start before the one ahead of them has ended still see all that it wrote."""

import pytest
import torch

from twostroke.kernels.gpu.add_norm import add_norm
from twostroke.kernels.gpu.gated import gated
from twostroke.kernels.gpu.rope_write import rope_write

WIDTH, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 2048, 16, 8, 128, 64


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 300, 4096])
def test_a_chain_of_kernels_computes_the_same(device, rows):
    generator = torch.Generator(device).manual_seed(rows)
    delta = torch.randn(rows, WIDTH, device=device, generator=generator).bfloat16()
    weight = torch.rand(WIDTH, device=device, generator=generator) + 0.5
    angles = torch.randn(4096, HEAD_DIM, device=device, generator=generator)
    pages = -(-rows // PAGE_SIZE)
    tables = torch.zeros(2, pages, dtype=torch.int32, device=device)
    tables[1] = torch.arange(1, pages + 1)
    slots = torch.ones(rows, dtype=torch.int32, device=device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    results = []
    for pdl in (False, True):
        hidden = torch.zeros(rows, WIDTH, device=device)
        normed, passed = torch.zeros_like(delta), delta.clone()
        qkv = torch.zeros(rows, 2 * WIDTH, dtype=torch.bfloat16, device=device)
        pool = torch.zeros(pages + 1, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device)

        def layer(pdl=pdl, hidden=hidden, normed=normed, passed=passed, qkv=qkv, pool=pool):
            add_norm(hidden, passed, weight, 1e-5, normed, pdl=pdl)
            qkv[:, :WIDTH].copy_(normed)  # a kernel that knows nothing of it
            qkv[:, WIDTH:].copy_(normed)
            shape = {"heads": HEADS, "kv_heads": KV_HEADS, "page_size": PAGE_SIZE, "eps": 1e-5, "qk_norm": None}
            rope_write(qkv, positions, slots, angles, pool, tables, **shape, pdl=pdl)
            gated(qkv, passed, "silu", pdl=pdl)

        layer()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                layer()
        for _ in range(5):
            graph.replay()
        results.append((hidden, passed, qkv, pool))
    assert results[0][0].any()
    assert not results[0][0].isnan().any()
    for plain, dependent in zip(*results, strict=True):
        assert torch.equal(plain, dependent)
