import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from twostroke.engine.model_config import ModelConfig
from twostroke.engine.weights import load_weights
from twostroke.errors import ConfigError


@pytest.fixture
def checkpoint(tiny, tmp_path):
    return tiny.make_tiny_llama(tmp_path / "m")


def load(path, dtype=torch.float32):
    return load_weights(path, ModelConfig.from_dir(path), dtype)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def identity_product(linear):
    """The matrix that a Linear applies: [out, in]."""
    return linear(torch.eye(linear.in_features)).t()


def test_matrices_are_fused_in_order(checkpoint):
    weights, tensors = load(checkpoint), load_file(checkpoint / "model.safetensors")
    assert len(weights.layers) == 2
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        for linear, names in (
            (layer.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            (layer.o, ["self_attn.o_proj"]),
            (layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.down, ["mlp.down_proj"]),
        ):
            expected = torch.cat([tensors[f"{at}{name}.weight"] for name in names])
            torch.testing.assert_close(identity_product(linear), expected, rtol=0, atol=1e-6)
        assert torch.equal(layer.attention_norm, tensors[at + "input_layernorm.weight"])
        assert torch.equal(layer.mlp_norm, tensors[at + "post_attention_layernorm.weight"])
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    torch.testing.assert_close(identity_product(weights.head), tensors["lm_head.weight"], rtol=0, atol=1e-6)
    assert torch.equal(weights.norm, tensors["model.norm.weight"])


def test_a_tied_model_uses_the_embedding_table_even_beside_an_output_matrix(tiny, tmp_path):
    path = tiny.make_tiny_llama(tmp_path / "m", tied=True)
    weights = load(path)
    torch.testing.assert_close(identity_product(weights.head), weights.embedding, rtol=0, atol=1e-6)
    rewrite(path, lambda t: t.update({"lm_head.weight": torch.zeros_like(t["model.embed_tokens.weight"])}))
    torch.testing.assert_close(identity_product(load(path).head), weights.embedding, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_converted_and_norms_kept_in_float32(checkpoint, dtype):
    weights, tensors = load(checkpoint, dtype), load_file(checkpoint / "model.safetensors")
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(dtype))
    assert weights.norm.dtype == weights.layers[0].mlp_norm.dtype == torch.float32
    x = torch.ones(1, 64, dtype=dtype)
    assert weights.layers[1].gate_up(x).dtype == dtype


def test_shards_are_found_by_the_index(checkpoint):
    whole = load(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, checkpoint / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load(checkpoint)
    assert torch.equal(sharded.embedding, whole.embedding)
    for ours, theirs in zip(sharded.layers, whole.layers, strict=True):
        assert torch.equal(identity_product(ours.qkv), identity_product(theirs.qkv))
        assert torch.equal(identity_product(ours.down), identity_product(theirs.down))


def test_weights_outlive_their_file(checkpoint):
    weights = load(checkpoint)
    before = weights.embedding.clone(), identity_product(weights.head)
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-200_000:] = bytes(200_000)
    (checkpoint / "model.safetensors").open("r+b").write(content)
    assert torch.equal(weights.embedding, before[0])
    assert torch.equal(identity_product(weights.head), before[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)}),
            "k_proj.weight is [64, 64], not [32, 64]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(63)}), "model.norm.weight is [63], not [64]"),
        (lambda t: t.clear() or t.update({"x": torch.zeros(1)}), "and 16 more"),
    ],
)
def test_what_does_not_fit_is_named(checkpoint, change, named):
    rewrite(checkpoint, change)
    with pytest.raises(ConfigError) as caught:
        load(checkpoint)
    assert named in caught.value.message
    assert caught.value.field == "model"


def test_a_config_with_biases_wants_their_tensors(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    with pytest.raises(ConfigError, match=r"q_proj\.bias is missing"):
        load(checkpoint)


def test_unreadable_files_are_named(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has neither"):
        load(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        load(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(ConfigError, match="outside its directory"):
        load(checkpoint)
