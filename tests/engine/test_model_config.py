import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig

from twostroke.engine.layer_kinds import LayerKind
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.rope_config import Rope
from twostroke.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def read(generation=None, **changes) -> ModelConfig:
    config = {**LLAMA, **changes}
    return ModelConfig.from_dicts({k: v for k, v in config.items() if v is not ...}, generation or {})


def test_what_is_absent_has_the_defaults_of_transformers():
    config, reference = read(), LlamaConfig()
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 4, 24)
    assert config.context_length == reference.max_position_embeddings
    assert config.norm_eps == reference.rms_norm_eps
    assert config.kinds == (LayerKind(Rope(10_000.0, 24)),)
    assert config.tied == reference.tie_word_embeddings
    assert (config.qkv_bias, config.o_bias) == (reference.attention_bias,) * 2
    assert config.mlp_bias == reference.mlp_bias
    assert (config.eos_token_ids, config.bos_token_id) == (frozenset(), None)


def test_what_is_given_is_taken():
    config = read(
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_id=[2, 7],
    )
    assert (config.layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (3, 96, 200, 1000)
    assert (config.kv_heads, config.head_dim, config.context_length, config.norm_eps) == (2, 32, 8192, 1e-5)
    assert (config.tied, config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, frozenset({2, 7}))


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": None, "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_every_spelling_of_the_rope_base(spelling):
    (kind,) = read(**spelling).kinds
    assert kind == LayerKind(Rope(500_000.0, 24))


def test_stop_tokens_of_the_generation_config_win():
    assert read({"eos_token_id": [0, 2]}, eos_token_id=5).eos_token_ids == {0, 2}
    assert read({"eos_token_id": 3}, eos_token_id=5).eos_token_ids == {3}
    assert read({}, eos_token_id=5).eos_token_ids == {5}
    assert read({"eos_token_id": None}, eos_token_id=5).eos_token_ids == {5}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is GPT2LMHeadModel"),
        ({"architectures": ...}, "architectures is none"),
        ({"architectures": []}, "architectures is none"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks rope_scaling.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type is proportional"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.type is mrope"),
        ({"rope_scaling": {"type": "linear"}}, "lacks rope_scaling.factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is linear"),
        ({"rope_theta": -1.0}, "rope_theta is -1"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method is awq"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 25}, "head_dim is 25"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is 3"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is small"),
        ({"eos_token_id": "x"}, "eos_token_id is x"),
        ({"bos_token_id": [1]}, "bos_token_id is"),
    ],
)
def test_what_cannot_be_served_is_named(changes, named):
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")) as caught:
        read(**changes)
    assert caught.value.field == "model"


def test_a_directory_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 1}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == {4}


def test_the_embedded_model(smollm2_dir):
    config = ModelConfig.from_dir(smollm2_dir)
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.context_length) == (49152, 8192)
    assert config.kinds == (LayerKind(Rope(100_000.0, 64)),)
    assert config.tied
    assert {0, 2} == config.eos_token_ids


def test_reading_it_does_not_import_torch():
    code = "import sys, twostroke.engine.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
