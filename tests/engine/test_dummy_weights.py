import importlib.util
import json
from pathlib import Path

import pytest
import torch

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.dummy_weights import dummy_fingerprint, dummy_weights
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.model_files import fingerprint
from twostroke.engine.request import Request, SamplingParams, SequenceKey

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parent.parent / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)


def build(path: Path, **options) -> Engine:
    return build_engine(path, EngineOptions(load_format="dummy", kv_memory=8 << 20, **options), fingerprint="f")


def greedy(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.core.add(Request(SequenceKey(1, 0, 0, 0), list(range(3, 40)), params))
    tokens = []
    while engine.core.has_work():
        result = engine.core.step()
        assert not result.failures
        tokens += [token.token_id for output in result.outputs for token in output.tokens]
    return tokens


@pytest.mark.parametrize("name", sorted(tiny_models.MODELS))
def test_every_family_serves_from_its_configuration_alone(name, tmp_path):
    path = tiny_models.make_config(tmp_path, name)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    assert len(greedy(build(path))) == 6


def test_it_is_the_same_each_time(tmp_path):
    path = tiny_models.make_config(tmp_path, "llama3")
    assert greedy(build(path, dtype="float32")) == greedy(build(path, dtype="float32"))
    config = ModelConfig.from_dir(path)
    first, second = (dummy_weights(config, torch.bfloat16) for _ in range(2))
    assert torch.equal(first.embedding, second.embedding)
    assert torch.equal(first.layers[-1].down.weight(), second.layers[-1].down.weight())


def test_it_does_not_draw_from_the_global_generator(tmp_path):
    config = ModelConfig.from_dir(tiny_models.make_config(tmp_path, "llama2"))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    dummy_weights(config, torch.float32)
    assert torch.rand(1) == expected


@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "gemma3", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_stream_stays_finite_and_the_logits_spread_over_many_layers(name, dtype, tmp_path):
    path = tiny_models.make_config(tmp_path, name)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 32, "layer_types": None, "final_logit_softcapping": None}
    (path / "config.json").write_text(json.dumps(config))
    seen: list[float] = []
    logits = build(path, dtype=dtype).runner.trace(list(range(3, 100)), lambda x: seen.append(float(x.abs().max())))
    assert len(seen) == 33
    assert max(seen) < 200
    assert logits.isfinite().all()
    assert 1 < float(logits.to(torch.float32).std()) < 8


def test_norms_multiply_by_one_whatever_their_offset(tmp_path):
    weights = dummy_weights(ModelConfig.from_dir(tiny_models.make_config(tmp_path, "gemma3")), torch.bfloat16)
    layer = weights.layers[0]
    for norm in (weights.norm, layer.attention_norm, layer.mlp_norm, layer.qk_norm, layer.mlp_post_norm):
        assert norm.dtype == torch.float32
        assert (norm == 1).all()


def test_its_fingerprint_is_its_own(tiny, tmp_path):
    path = tiny.make_tiny_llama(tmp_path / "m")
    options = EngineOptions(load_format="dummy")
    own = dummy_fingerprint(path, options)
    assert own == dummy_fingerprint(path, options)
    assert own != fingerprint(path)
    assert own != dummy_fingerprint(path, EngineOptions(dtype="float32"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    assert own == dummy_fingerprint(path, options)
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    assert own != dummy_fingerprint(path, options)
