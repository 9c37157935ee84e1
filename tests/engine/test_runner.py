"""The runner on a tiny model: any mixture of chunks and decode rows gives each sequence the same tokens."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import LlamaForCausalLM

from twostroke.engine.batch import Row
from twostroke.engine.config import EngineOptions
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.request import ChunkProgress, SamplingParams, SequenceKey
from twostroke.engine.runner import ModelRunner
from twostroke.engine.weights import load_weights

PAGES = 200


@dataclass
class Live:
    """A sequence under way."""

    key: SequenceKey
    tokens: list[int]
    params: SamplingParams
    wanted: int
    pages: list[int]
    done: int = 0
    output: list[int] = field(default_factory=list)

    def row(self, most: int) -> Row:
        chunk = self.tokens[self.done : self.done + most]
        return Row(self.key, chunk, self.done, self.pages, self.params, self.done + len(chunk) == len(self.tokens))


class Bench:
    """Drives a runner without a scheduler."""

    def __init__(self, path, seed: int = 0, page_size: int = 16) -> None:
        config = ModelConfig.from_dir(path)
        options = EngineOptions(dtype="float32", page_size=page_size)
        size = (config.layers, PAGES, 2, config.kv_heads, page_size, config.head_dim)
        self.pool = torch.full(size, float("nan"))
        self.runner = ModelRunner(config, load_weights(path, config, torch.float32), options, self.pool)
        self.draw = random.Random(seed)
        self.free = list(range(1, PAGES))
        self.draw.shuffle(self.free)
        self.size = page_size

    def live(self, number: int, prompt: list[int], params: SamplingParams, wanted: int) -> Live:
        pages = [self.free.pop() for _ in range((len(prompt) + wanted) // self.size + 1)]
        return Live(SequenceKey(1, number, 0, 0), list(prompt), params, wanted, pages)

    def finish(self, sequences: list[Live]) -> list[list[int]]:
        """Runs random subsets with random chunks until all have what they want."""
        while running := [s for s in sequences if len(s.output) < s.wanted]:
            chosen = self.draw.sample(running, self.draw.randint(1, len(running)))
            rows = [s.row(self.draw.choice([1, 2, 7, 16, 50, 1000])) for s in chosen]
            tokens = iter(self.runner.run(rows, None))
            for sequence, row in zip(chosen, rows, strict=True):
                sequence.done += len(row.token_ids)
                if row.sample:
                    sequence.output.append(next(tokens).token_id)
                    sequence.tokens.append(sequence.output[-1])
            assert next(tokens, None) is None
        return [s.output for s in sequences]


def prompts(tiny, count: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(300) for _ in range(draw.choice([1, 2, 15, 16, 17, 40, 130]))] for _ in range(count)]


@pytest.fixture(scope="module")
def reference(tiny_llama_dir) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


def test_greedy_equals_transformers_for_64_tokens(tiny, tiny_llama_dir, reference):
    bench = Bench(tiny_llama_dir)
    params = SamplingParams(temperature=0.0)
    given = prompts(tiny, 9)
    outputs = bench.finish([bench.live(i, prompt, params, 64) for i, prompt in enumerate(given)])
    with torch.inference_mode():
        for prompt, output in zip(given, outputs, strict=True):
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(dim=1).tolist() == output


@pytest.mark.parametrize("seed", range(4))
def test_alone_among_others_and_in_any_chunks(tiny, tiny_llama_dir, seed):
    kinds = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(seed=4, top_k=20, top_p=0.9)]
    given = [(prompt, replace(kinds[i % 3], seed=i)) for i, prompt in enumerate(prompts(tiny, 17))]
    alone = []
    for i, (prompt, params) in enumerate(given):
        bench = Bench(tiny_llama_dir, seed=100 * seed + i)
        alone.append(bench.finish([bench.live(i, prompt, params, 12)])[0])
    bench = Bench(tiny_llama_dir, seed=seed, page_size=[16, 32, 64, 128][seed])
    together = bench.finish([bench.live(i, prompt, params, 12) for i, (prompt, params) in enumerate(given)])
    assert together == alone
    assert len({tuple(output) for output in alone}) > 10


def test_tokens_come_in_row_order_for_the_rows_that_sample(tiny_llama_dir):
    params = SamplingParams(temperature=0.0)
    given = [[5], list(range(30)), [9, 8], [4] * 20, [7]]
    expected = [Bench(tiny_llama_dir).runner.run([Row(SequenceKey(1, 0, 0, 0), p, 0, [1, 2], params, True)], None)[0]
                for p in given]  # fmt: skip
    rows = [Row(SequenceKey(1, i, 0, 0), p, 0, [2 * i + 1, 2 * i + 2], params, i != 3) for i, p in enumerate(given)]
    assert Bench(tiny_llama_dir).runner.run(rows, None) == [expected[i] for i in (0, 1, 2, 4)]


def test_the_draw_is_keyed_by_the_position_and_the_sample_index(tiny_llama_dir):
    params = SamplingParams(seed=9, temperature=50.0)

    def first(sample: int, prompt: list[int]) -> int:
        row = Row(SequenceKey(1, 1, sample, 0), prompt, 0, [1, 2, 3], params, True)
        return Bench(tiny_llama_dir).runner.run([row], None)[0].token_id

    assert first(0, [3, 4]) == first(0, [3, 4])
    assert len({first(0, [3, 4]), first(1, [3, 4]), first(2, [3, 4]), first(0, [3, 4, 4])}) >= 3


def test_the_hook_gets_each_layer_in_order_with_the_progress_of_prefill_rows(tiny_llama_dir):
    bench, calls = Bench(tiny_llama_dir), []
    params = SamplingParams(temperature=0.0)
    progress = ChunkProgress(SequenceKey(1, 2, 0, 0), [3, 4], 20, 20)
    rows = [
        Row(SequenceKey(1, 1, 0, 0), [1], 0, [1], params, True),
        Row(progress.key, list(range(20)), 0, [3, 4], params, False, progress),
    ]

    def hook(layer: int, told: list[ChunkProgress]) -> None:
        written = bench.pool[layer, [3, 4]].transpose(1, 3).flatten(0, 1)[:20]
        calls.append((layer, told, bool(written.isfinite().all())))

    bench.runner.run(rows, hook)
    assert calls == [(0, [progress], True), (1, [progress], True)]
    bench.runner.run(rows[:1], hook)
    assert len(calls) == 2


def test_no_rows(tiny_llama_dir):
    assert Bench(tiny_llama_dir).runner.run([], None) == []


def test_the_rows_are_left_as_they_were(tiny_llama_dir):
    rows = [Row(SequenceKey(1, 0, 0, 0), [1, 2, 3], 0, [4, 5], SamplingParams(), True)]
    Bench(tiny_llama_dir).runner.run(rows, None)
    assert (rows[0].token_ids, rows[0].start, rows[0].pages) == ([1, 2, 3], 0, [4, 5])
