"""The fused elementwise kernels on one GPU at the shape of Llama-3.1-8B: checked, then timed as CUDA graphs.

`python benchmarks/gpu_elementwise.py [--tune] [--pdl] [--rows 1 32 256 8192] [--json FILE]`, about half a minute.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from record import Recorder
from torch import Tensor

from twostroke.kernels.activation import silu_mul, soft_cap
from twostroke.kernels.digest import pool_digests
from twostroke.kernels.gpu import add_norm, embed, gated, page_copy, page_digest, rope_write, state
from twostroke.kernels.norm import rms_norm
from twostroke.kernels.rope import rope_angles, rope_frequencies, rotate_
from twostroke.kernels.tolerances import TOLERANCES

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 4096, 32, 8, 128, 14336, 128256
PAGE_SIZE, LAYERS, CONTEXT, EPS, CAP = 64, 32, 8192, 1e-5, 30.0
PAGE_BYTES = 2 * KV_HEADS * PAGE_SIZE * HEAD_DIM * 2
MOVED, DIGESTED = 16, 128  # pages of all layers copied; pages of one layer and of four digested
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU is for a look at the script
DTYPE = torch.bfloat16
TUNED = {  # module: constants tried, in all combinations
    gated: {"_BLOCK": (1024, 2048, 4096, 8192), "_WARPS": (4, 8)},
    add_norm: {"_THREAD_ELEMENTS": (4, 8, 16), "_MAX_WARPS": (32,)},
    rope_write: {"_HALF_ELEMENTS": (512, 1024, 2048), "_WARPS": (2, 4, 8)},
    page_copy: {"_BLOCK": (1024, 2048, 4096), "_WARPS": (4, 8)},
    page_digest: {"_BLOCK": (2048, 4096, 8192), "_WARPS": (8, 16)},
}


@dataclass(frozen=True)
class Case:
    """A launch to be timed."""

    name: str
    rows: int
    nbytes: int  # least traffic
    launch: Callable[[], object]


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def ints(values: Tensor) -> Tensor:
    """int32 on the device."""
    return values.to(torch.int32).to(DEVICE)


class Step:
    """The tensors of a step of `rows` tokens, of which any number of sequences has its pages in shuffled order."""

    def __init__(self, rows: int, pdl: bool = False) -> None:
        """`rows`: above 256 one prompt's, else of a sequence each."""
        self.rows, self.pdl = rows, pdl
        pages = rows if rows <= 256 else -(-rows // PAGE_SIZE)
        self.tables = torch.zeros(rows + 1, CONTEXT // PAGE_SIZE, dtype=torch.int32, device=DEVICE)
        order = ints(torch.randperm(pages) + 1)
        if rows <= 256:
            self.tables[1:] = order[:, None]
            self.slots, self.positions = ints(torch.arange(rows) + 1), ints(torch.randint(0, CONTEXT, (rows,)))
        else:
            self.tables[1, :pages] = order
            self.slots, self.positions = ints(torch.ones(rows)), ints(torch.arange(rows))
        self.pool = torch.zeros(pages + 1, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=DTYPE, device=DEVICE)
        cos, sin = rope_angles(torch.arange(CONTEXT), rope_frequencies(5e5, HEAD_DIM))
        self.angles = torch.cat((cos[:, 0, : HEAD_DIM // 2], sin[:, 0, HEAD_DIM // 2 :]), dim=-1).to(DEVICE)
        self.qk_norm = torch.rand(HEADS + KV_HEADS, HEAD_DIM, device=DEVICE) + 0.5
        self.qkv = random(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.hidden, self.delta = random(rows, WIDTH, dtype=torch.float32), random(rows, WIDTH)
        self.normed = torch.empty_like(self.delta)
        self.weight = torch.rand(WIDTH, device=DEVICE) + 0.5
        self.gate_up, self.inner = random(rows, 2 * INNER), random(rows, INNER)
        self.tokens, self.last_tokens = torch.randint(0, VOCAB, (2, rows + 1), device=DEVICE)
        self.tokens = self.tokens[:rows]

    def rope(self, qk_norm: Tensor | None = None) -> None:
        """One launch."""
        rope_write.rope_write(
            self.qkv,
            self.positions,
            self.slots,
            self.angles,
            self.pool,
            self.tables,
            heads=HEADS,
            kv_heads=KV_HEADS,
            page_size=PAGE_SIZE,
            eps=EPS,
            qk_norm=qk_norm,
            pdl=self.pdl,
        )

    def norm(self) -> None:
        """One launch."""
        add_norm.add_norm(self.hidden, self.delta, self.weight, EPS, self.normed, pdl=self.pdl)

    def gate(self) -> None:
        """One launch."""
        gated.gated(self.gate_up, self.inner, "silu", pdl=self.pdl)

    def cases(self, embedding: Tensor) -> list[Case]:
        """`embedding`: [vocab, width]."""
        rows, qkv = self.rows, self.qkv.nbytes
        embedded = torch.empty_like(self.hidden)
        unknown = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
        norm_bytes = 2 * self.hidden.nbytes + 2 * self.delta.nbytes
        found = [
            Case(
                "embed",
                rows,
                self.hidden.nbytes * 3 // 2,
                lambda: embed.embed(unknown, self.slots, self.last_tokens, embedding, embedded, 1.0),
            ),
            Case("add_norm", rows, norm_bytes, self.norm),
            Case("rope_write", rows, 2 * qkv, self.rope),
            Case("rope_write, QK norm", rows, 2 * qkv, lambda: self.rope(self.qk_norm)),
            Case("gated", rows, 3 * self.inner.nbytes, self.gate),
        ]
        if rows <= 256:
            logits = random(rows, VOCAB)
            found.append(Case("soft_cap_", rows, 2 * logits.nbytes, lambda: gated.soft_cap_(logits, CAP)))
            kept, turn = torch.zeros_like(self.last_tokens), torch.zeros(1, dtype=torch.int32, device=DEVICE)
            told = torch.zeros(1, rows, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
            tokens = (kept, self.slots, self.tokens, told, turn)
            found.append(Case("keep_tokens", rows, 28 * rows, lambda: state.keep_tokens(*tokens)))
        return found


def page_cases() -> list[Case]:
    """Copies and digests of pages."""
    layers, pages = (LAYERS, DIGESTED + 1) if DEVICE.type == "cuda" else (4, 5)
    moved, digested = min(MOVED, pages // 2), pages - 1
    pool = random(layers, pages, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pairs = ints(torch.randperm(pages - 1)[: 2 * moved].view(-1, 2) + 1)
    ids, out = ints(torch.randperm(digested) + 1), torch.empty(layers, digested, dtype=torch.int64, device=DEVICE)

    def digest(count: int) -> None:
        page_digest.digest_pages(pool[:count], ids, out[:count], ticket=1 << 40, first_layer=0, ordinal=0)

    return [
        Case("copy_pages", moved, 2 * moved * layers * PAGE_BYTES, lambda: page_copy.copy_pages(pool, pairs)),
        Case("digest_pages, 1 layer", digested, digested * PAGE_BYTES, lambda: digest(1)),
        Case("digest_pages, 4 layers", digested, 4 * digested * PAGE_BYTES, lambda: digest(4)),
    ]


def check(embedding: Tensor) -> None:
    """Each kernel against its reference in float32. Raises AssertionError."""
    for rows in (1, 77):
        step = Step(rows)
        relative, absolute = TOLERANCES[DTYPE]

        def close(result: Tensor, expected: Tensor, r: float = relative, a: float = absolute) -> None:
            torch.testing.assert_close(result.float(), expected.float(), rtol=r, atol=a)

        total = step.hidden + step.delta
        step.norm()
        torch.testing.assert_close(step.hidden, total)
        close(step.normed, rms_norm(total, step.weight, EPS, DTYPE))
        step.gate()
        close(step.inner, silu_mul(step.gate_up.float()))
        heads = step.qkv.float().view(rows, -1, HEAD_DIM)
        cos, sin = rope_angles(step.positions, rope_frequencies(5e5, HEAD_DIM, DEVICE))
        rotate_(heads[:, : HEADS + KV_HEADS], cos, sin)
        step.rope()
        close(step.qkv.view(rows, -1, HEAD_DIM)[:, :HEADS], heads[:, :HEADS], relative, 5e-2)
        slots, places = step.slots.long(), step.positions.long()
        page = step.tables[slots, places // PAGE_SIZE].long()
        close(step.pool[page, :, :, places % PAGE_SIZE].flatten(1, 2), heads[:, HEADS:], relative, 5e-2)
        logits = random(rows, VOCAB) * 20
        capped = logits.clone()
        gated.soft_cap_(capped, CAP)
        close(capped, soft_cap(logits, CAP))
        embedded = torch.empty_like(step.hidden)
        embed.embed(step.tokens, step.slots, step.last_tokens, embedding, embedded, 2.0)
        assert torch.equal(embedded, 2 * embedding[step.tokens].float())
    pool = random(2, 3, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    page_copy.copy_pages(pool, torch.tensor([(1, 2)], dtype=torch.int32, device=DEVICE))
    assert torch.equal(pool[:, 1], pool[:, 2])
    out, ids = torch.empty(2, 2, dtype=torch.int64, device=DEVICE), torch.tensor([2, 0], device=DEVICE)
    page_digest.digest_pages(pool, ids, out, ticket=2**63 + 1, first_layer=3, ordinal=9)
    host = pool.cpu().view(torch.uint8).view(2, 3, -1)
    assert out.cpu().numpy().tobytes() == pool_digests(host, [2, 0], ticket=2**63 + 1, first_layer=3, ordinal=9)


def seconds(case: Case) -> float:
    """Of one launch: the median of 7 replays of a graph of many."""
    case.launch()
    if DEVICE.type != "cuda":
        start = time.perf_counter()
        case.launch()
        return time.perf_counter() - start
    launches = max(4, min(50, 2**30 // case.nbytes))
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(launches):
            case.launch()
    graph.replay()
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / launches)
    return statistics.median(times)


def tune(rows: list[int], pdl: bool) -> None:
    """Prints the times of the launch constants' combinations."""
    steps = [Step(count, pdl) for count in rows]
    for module, constants in TUNED.items():
        for values in itertools.product(*constants.values()):
            for name, value in zip(constants, values, strict=True):
                setattr(module, name, value)
            if module in (page_copy, page_digest):
                tried = [case for case in page_cases() if case.name.startswith(module.__name__.split("_")[-1])]
            else:
                method = {gated: Step.gate, add_norm: Step.norm, rope_write: Step.rope}[module]
                tried = [Case("", step.rows, 2**24, lambda step=step, method=method: method(step)) for step in steps]
            figures = "  ".join(f"{case.rows} {seconds(case) * 1e6:.2f}" for case in tried)
            print(module.__name__.split(".")[-1], dict(zip(constants, values, strict=True)), "us at rows:", figures)


def main() -> None:
    """Checks, measures, prints a table, records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 8192])
    parser.add_argument("--tune", action="store_true", help="try the kernels' launch constants instead")
    parser.add_argument("--pdl", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records here, not to results/gpu.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.tune:
        return tune(args.rows, args.pdl)
    embedding = random(VOCAB, WIDTH)
    check(embedding)
    recorder = Recorder("gpu", args.json)
    cases = page_cases()
    source, target = random(2, 2**28 if DEVICE.type == "cuda" else 2**10)
    cases.append(Case("copy by torch", 0, 2 * source.nbytes, lambda: target.copy_(source)))
    for case in itertools.chain(cases, *(Step(rows, args.pdl).cases(embedding) for rows in args.rows)):
        taken = seconds(case)
        print(f"{case.name:24s} {case.rows:6d} rows {taken * 1e6:9.2f} us {case.nbytes / taken / 1e12:7.3f} TB/s")
        recorder.add("elementwise", taken * 1e6, "us", mode=case.name, rows=case.rows, dtype="bfloat16", pdl=args.pdl)


if __name__ == "__main__":
    main()
