"""The decoder against transformers on random checkpoints that transformers itself wrote."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twostroke.engine.decoder import Decoder, KindInputs, StepInputs
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.rope_scaling import frequencies
from twostroke.engine.weights import load_weights
from twostroke.kernels.attention_plan import PoolShape, Span, plan_attention
from twostroke.kernels.kv_write import kv_rows
from twostroke.kernels.rope import rope_angles

SHAPES = {
    "plain": {},
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "wide heads": {"head_dim": 80, "num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "rope base": {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}, "rms_norm_eps": 1e-3},
}


def make_model(path, **changes) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 211,
        "hidden_size": 96,
        "intermediate_size": 130,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(path)
    return model


class Harness:
    """A decoder with a poisoned pool, fed with spans of token ids."""

    def __init__(self, path, dtype=torch.float32, pages=40, page_size=16) -> None:
        self.config = ModelConfig.from_dir(path)
        self.shape = PoolShape(self.config.kv_heads, page_size, self.config.head_dim)
        size = (self.config.layers, pages, 2, self.config.kv_heads, page_size, self.config.head_dim)
        self.pool = torch.full(size, float("nan"), dtype=dtype)
        self.decoder = Decoder(self.config, load_weights(path, self.config, dtype), self.pool)

    def step(self, rows: list[tuple[list[int], int, list[int]]], sampled: list[int]) -> StepInputs:
        """`rows`: (token ids, start, block table)."""
        spans, tokens, positions, slots = [], [], [], []
        for ids, start, pages in rows:
            spans.append(Span(len(tokens), len(ids), start, pages))
            tokens += ids
            reach = range(start, start + len(ids))
            positions += reach
            slots += [pages[p // self.shape.page_size] * self.shape.page_size + p % self.shape.page_size for p in reach]
        kinds = [
            KindInputs(
                *rope_angles(torch.tensor(positions), frequencies(kind.rope), kind.rope.attention_factor),
                plan_attention(spans, self.shape, window=kind.window),
            )
            for kind in self.config.kinds
        ]
        return StepInputs(
            token_ids=torch.tensor(tokens),
            kv_rows=kv_rows(torch.tensor(slots), self.shape.kv_heads, self.shape.page_size),
            by_kind=kinds,
            sampled=torch.tensor(sampled, dtype=torch.int64),
        )

    def run(self, rows: list[tuple[list[int], int, list[int]]], sampled: list[int], written=None) -> torch.Tensor:
        with torch.inference_mode():
            return self.decoder.forward(self.step(rows, sampled), written)


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 211, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_equal_transformers(tmp_path, changes):
    model, harness = make_model(tmp_path, **changes), Harness(path=tmp_path)
    prompts = [ids_of(1, 1), ids_of(50, 2), ids_of(33, 3)]
    tables = [[3], [9, 5, 7, 1], [2, 30, 39]]
    logits = harness.run([(p, 0, t) for p, t in zip(prompts, tables, strict=True)], [0, 50, 83])
    with torch.inference_mode():
        for row, prompt in zip(logits, prompts, strict=True):
            expected = model(torch.tensor([prompt])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_prefill_in_chunks_then_decode_equals_one_pass(tmp_path):
    model, harness = make_model(tmp_path, **SHAPES["grouped"]), Harness(path=tmp_path)
    ids, table = ids_of(70), [4, 11, 2, 8, 17]
    rows = []
    for start, count in ((0, 13), (13, 1), (14, 40), (54, 2), *((i, 1) for i in range(56, 70))):
        rows.append(harness.run([(ids[start : start + count], start, table)], [count - 1])[0])
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    ends = [12, 13, 53, 55, *range(56, 70)]
    torch.testing.assert_close(torch.stack(rows), expected[ends], rtol=1e-4, atol=1e-4)


def test_rows_of_a_step_see_each_others_kv(tmp_path):
    """Two chunks of one sequence in one step, and a second sequence that shares the first one's pages."""
    model, harness = make_model(tmp_path), Harness(path=tmp_path)
    ids, other = ids_of(40), [*ids_of(40)[:32], 7, 8, 9]
    rows = [(ids[32:], 32, [1, 2, 3]), (ids[:32], 0, [1, 2]), (other[32:], 32, [1, 2, 4])]
    logits = harness.run(rows, [7, 42])
    with torch.inference_mode():
        expected = [model(torch.tensor([x])).logits[0, -1] for x in (ids, other)]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_the_kv_of_a_layer_is_written_when_it_is_announced(tmp_path):
    make_model(tmp_path)
    harness = Harness(path=tmp_path)
    seen = []

    def written(layer: int) -> None:
        done = [not bool(harness.pool[i, 6, :, :, :9].isnan().any()) for i in range(3)]
        seen.append((layer, done))

    harness.run([(ids_of(9), 0, [6])], [8], written)
    assert seen == [(0, [True, False, False]), (1, [True, True, False]), (2, [True, True, True])]


def test_a_step_without_samples_still_writes_every_layer(tmp_path):
    model, harness = make_model(tmp_path), Harness(path=tmp_path)
    ids, layers = ids_of(20), []
    assert harness.run([(ids[:19], 0, [5, 6])], [], layers.append).shape == (0, 211)
    assert layers == [0, 1, 2]
    logits = harness.run([(ids[19:], 19, [5, 6])], [0])
    with torch.inference_mode():
        torch.testing.assert_close(logits[0], model(torch.tensor([ids])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_only_the_pages_of_the_step_change(tmp_path):
    make_model(tmp_path)
    harness = Harness(path=tmp_path)
    harness.run([(ids_of(20), 0, [5, 6])], [19])
    assert bool(harness.pool[:, [i for i in range(40) if i not in (5, 6)]].isnan().all())
    assert bool(harness.pool[:, 6, :, :, 4:].isnan().all())
    assert not bool(harness.pool[:, 6, :, :, :4].isnan().any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types_stay_close(tmp_path, dtype):
    model, harness = make_model(tmp_path), Harness(path=tmp_path, dtype=dtype)
    ids = ids_of(40)
    logits = harness.run([(ids, 0, [1, 2, 3])], [39])
    assert logits.dtype == dtype
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    assert torch.nn.functional.cosine_similarity(logits[0].float(), expected, dim=0) > 0.999


def test_observe_is_shown_the_embeddings_and_each_layers_output(tmp_path):
    model, harness = make_model(tmp_path), Harness(path=tmp_path)
    ids, seen, expected = ids_of(20), [], []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: expected.append(output[0]))
    with torch.inference_mode():
        model(torch.tensor([ids]))
        step = harness.step([(ids, 0, [1, 2])], list(range(20)))
        harness.decoder.hidden(step, observe=lambda hidden: seen.append(hidden.clone()))
        expected.insert(0, model.model.embed_tokens(torch.tensor(ids)))
    assert len(seen) == 4
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
