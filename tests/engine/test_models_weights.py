"""Checkpoints of every architecture: sharded, as a part of something larger, and with tensors missing or in excess."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twostroke.engine.build import build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.linear import Linear
from twostroke.errors import ConfigError

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parent.parent / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

OPTIONS = EngineOptions(dtype="float32", kv_memory=8 << 20)
IDS = [5, 17, 200, 33, 41, 9]


def build(path, **options):
    return build_engine(path, OPTIONS, fingerprint="f", **options)


def rewrite(path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma3", "phi3"])
def test_shards(tmp_path, name):
    model = tiny_models.make_model(tmp_path, name, shard="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(build(tmp_path).runner.trace(IDS, lambda stream: None), expected, rtol=1e-4, atol=1e-4)
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        build(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_as_a_part_of_a_model_that_sees(tmp_path, prefix):
    model = tiny_models.make_model(tmp_path, "gemma3")
    rewrite(tmp_path, lambda tensors: _move(tensors, prefix))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(build(tmp_path).runner.trace(IDS, lambda stream: None), expected, rtol=1e-4, atol=1e-4)
    rewrite(tmp_path, lambda tensors: tensors.pop(prefix + "layers.2.self_attn.q_norm.weight"))
    with pytest.raises(ConfigError) as caught:
        build(tmp_path)
    assert prefix + "layers.2.self_attn.q_norm.weight is missing" in caught.value.message


def _move(tensors, prefix: str) -> None:
    for name in list(tensors):
        tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)
    tensors["vision_tower.encoder.layers.0.mlp.fc1.weight"] = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight"),
        ("gemma2", "model.layers.3.post_feedforward_layernorm.weight"),
        ("gemma3", "model.layers.6.pre_feedforward_layernorm.weight"),
        ("phi3", "model.layers.2.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.2.mlp.gate_up_proj.weight"),
        ("mistral", "lm_head.weight"),
        ("llama-biases", "model.layers.0.mlp.down_proj.bias"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named_before_anything_is_allocated(tmp_path, name, tensor):
    tiny_models.make_model(tmp_path, name)
    shape = list(load_file(tmp_path / "model.safetensors")[tensor].shape)
    rewrite(tmp_path, lambda tensors: tensors.update({tensor: torch.zeros(*[n + 2 for n in shape])}))
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, allocate=_never)
    assert f"{tensor} is {[n + 2 for n in shape]}, not {shape}" in caught.value.message
    rewrite(tmp_path, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, allocate=_never)
    assert f"{tensor} is missing" in caught.value.message


def _never(nbytes: int) -> torch.Tensor:
    raise AssertionError("the pool was allocated")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama2", "model.layers.1.self_attn.q_proj.bias"),
        ("llama2", "model.layers.1.self_attn.q_norm.weight"),
        ("mistral", "model.layers.0.mlp.down_proj.weight_scale"),
    ],
)
def test_a_tensor_that_would_be_ignored_is_named(tmp_path, name, tensor):
    tiny_models.make_model(tmp_path, name)
    rewrite(tmp_path, lambda tensors: tensors.update({tensor: torch.zeros(3)}))
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, allocate=_never)
    assert f"{tensor} has no place in it" in caught.value.message


def test_constants_and_later_layers_are_no_strangers(tmp_path):
    tiny_models.make_model(tmp_path, "llama2")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "model.layers.3.x.weight": torch.zeros(1)}
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    build(tmp_path)


def test_types_without_scales_are_refused(tmp_path):
    tiny_models.make_model(tmp_path, "llama2")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ConfigError, match=r"up_proj\.weight is F8_E4M3, not one of"):
        build(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_weight_comes_back(dtype):
    weight = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(Linear(weight.clone()).weight(), weight)
