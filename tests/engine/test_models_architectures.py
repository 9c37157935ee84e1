"""Every architecture against transformers in fp32, on tiny random checkpoints: logits and greedy tokens.

The prompts are shorter and longer than the windows and the lengths trained on; they run in chunks and in one batch.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.request import Request, SamplingParams, SequenceKey
from twostroke.errors import InvalidRequest

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parent.parent / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

LENGTHS = (1, 7, 23, 24, 25, 60, 130, 200)
TOKENS = 32


def prompts(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, tiny_models.VOCAB, (n,), generator=generator).tolist() for n in lengths]


def build(path, dtype="float32", **options) -> Engine:
    engine = build_engine(path, EngineOptions(dtype=dtype, kv_memory=8 << 20, **options), fingerprint="f")
    engine.pool.fill_(float("nan"))  # what was not written must not be seen
    return engine


def greedy(engine: Engine, given: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs: dict[int, list[int]] = {i: [] for i in range(len(given))}
    for i, prompt in enumerate(given):
        engine.core.add(Request(SequenceKey(1, i, 0, 0), prompt, params))
    while engine.core.has_work():
        result = engine.core.step()
        assert not result.failures
        for output in result.outputs:
            outputs[output.key.request] += [token.token_id for token in output.tokens]
    engine.core.check_integrity(idle=True)
    return list(outputs.values())


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path, name):
    model = tiny_models.make_model(tmp_path, name)
    engine = build(tmp_path, token_budget=40)
    given = prompts()
    with torch.inference_mode():
        for prompt in given:
            logits = engine.runner.trace(prompt, lambda stream: None)
            torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)
    outputs = greedy(engine, given)
    assert [len(output) for output in outputs] == [TOKENS] * len(given)
    for prompt, output in zip(given, outputs, strict=True):
        assert tiny_models.greedy_departures(model, prompt, output) == []
    assert len({tuple(output) for output in outputs}) == len(given)


@pytest.mark.parametrize("name", tiny_models.WINDOWED)
@pytest.mark.parametrize("page_size", [16, 64])
def test_windows_matter_and_do_not_depend_on_pages_or_chunks(tmp_path, name, page_size):
    model = tiny_models.make_model(tmp_path, name)
    given = prompts((20, 21, 60, 120, 121, 122))
    outputs = greedy(build(tmp_path, page_size=page_size, token_budget=512), given)
    assert greedy(build(tmp_path, page_size=page_size, token_budget=17), given) == outputs
    for prompt, output in zip(given, outputs, strict=True):
        assert tiny_models.greedy_departures(model, prompt, output) == []
    # The same weights without the window say something else beyond it, and the same within.
    kind = build(tmp_path).config.layer_kinds
    assert any(k.window for k in kind)
    long, short = prompts((120, 18))
    engine = build(tmp_path)
    before = [engine.runner.trace(prompt, lambda stream: None) for prompt in (long, short)]
    engine.runner._kinds = tuple(type(k)(k.rope) for k in engine.runner._kinds)
    after = [engine.runner.trace(prompt, lambda stream: None) for prompt in (long, short)]
    assert not torch.allclose(before[0][-1], after[0][-1], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(before[1], after[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["mistral", "qwen3", "gemma2", "gemma3", "phi3"])
def test_16_bit_types_stay_close(tmp_path, name, dtype):
    model = tiny_models.make_model(tmp_path, name)
    engine = build(tmp_path, dtype)
    for prompt in prompts((20, 90)):
        logits = engine.runner.trace(prompt, lambda stream: None).float()
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        assert torch.nn.functional.cosine_similarity(logits, expected, dim=1).min() > 0.99


@pytest.mark.parametrize(("name", "limit"), [("llama-dynamic", 512), ("phi3-long", 256)])
def test_lengths_that_would_change_all_frequencies_are_refused(tmp_path, name, limit):
    """dynamic NTK and longrope rotate a whole sequence anew when it outgrows the length trained on."""
    tiny_models.make_model(tmp_path, name)
    engine = build(tmp_path)
    assert engine.config.context_length == limit
    with pytest.raises(InvalidRequest):
        engine.core.add(Request(SequenceKey(1, 0, 0, 0), [5] * limit, SamplingParams(max_tokens=1)))
    (output,) = greedy(engine, [[5] * (limit - TOKENS)])
    assert len(output) == TOKENS
