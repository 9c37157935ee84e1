"""Configurations as transformers 4 and 5 write them: read alike, and as transformers itself reads them."""

import copy

import pytest
import transformers

from twostroke.engine.architecture import ARCHITECTURES
from twostroke.engine.model_config import ModelConfig
from twostroke.errors import ConfigError

# As published on the hub (in the spelling of transformers 4), without what does not matter here.
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 152064,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "bos_token_id": 2, "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                      "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27},
}  # fmt: skip
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "bos_token_id": 1, "eos_token_id": 32000, "hidden_act": "silu",
    "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.1 + i for i in range(48)], "short_factor": [1.0 + i / 48 for i in range(48)],
                     "type": "longrope"},
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
PUBLISHED = {
    "Llama-3.1-8B": LLAMA31, "Mistral-7B-v0.1": MISTRAL, "Qwen2.5-7B": QWEN25, "Qwen3-0.6B": QWEN3,
    "gemma-2-9b": GEMMA2, "gemma-3-1b": GEMMA3, "gemma-3-4b": GEMMA3_4B, "Phi-3-mini-128k": PHI3,
}  # fmt: skip


def read(config, **changes) -> ModelConfig:
    merged = {**copy.deepcopy(config), **changes}
    return ModelConfig.from_dicts({key: value for key, value in merged.items() if value is not ...}, {})


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configurations_are_read_as_transformers_reads_them(config):
    ours = read(config)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    theirs = theirs.get_text_config()
    assert ours.layers == theirs.num_hidden_layers
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.hidden_size, ours.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (ours.vocab_size, ours.norm_eps) == (theirs.vocab_size, theirs.rms_norm_eps)
    assert ours.tied == theirs.tie_word_embeddings
    types = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None) or 0
    if types is not None:
        assert [kind.window for kind in ours.layer_kinds] == [
            window if kind == "sliding_attention" else 0 for kind in types
        ]
    else:
        assert {kind.window for kind in ours.layer_kinds} == {window}
    scalar = getattr(theirs, "query_pre_attn_scalar", ours.head_dim)
    assert ours.attention_scale == scalar**-0.5
    assert ours.final_cap == (getattr(theirs, "final_logit_softcapping", None) or 0.0)
    for kind in ours.kinds:
        rope = theirs.rope_parameters
        rope = rope["sliding_attention" if kind.window else "full_attention"] if "full_attention" in rope else rope
        assert kind.rope.theta == rope["rope_theta"]
        assert kind.rope.kind == rope["rope_type"]
        assert kind.rope.factor == rope.get("factor", 1.0)


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_what_transformers_5_writes_means_the_same(config):
    model = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    written = model.to_dict()
    written["architectures"] = config["architectures"]
    assert "rope_parameters" in (written.get("text_config") or written)
    assert ModelConfig.from_dicts(written, {}) == read(config)


def test_what_the_published_ones_are():
    assert read(LLAMA31).context_length == 131072
    assert read(QWEN25).context_length == 131072  # yarn reaches 4 times as far
    assert read(QWEN25, rope_scaling=None).context_length == 32768
    assert read(PHI3).context_length == 4096  # its short factors; see Rope
    assert (read(QWEN25).qkv_bias, read(QWEN25).o_bias) == (True, False)
    assert read(GEMMA2).attention_cap == 50.0
    assert read(GEMMA3).attention_cap == 0.0
    assert [kind.window for kind in read(GEMMA2).layer_kinds[:4]] == [4096, 0, 4096, 0]
    windows = [kind.window for kind in read(GEMMA3_4B).layer_kinds[:7]]
    assert windows == [1024, 1024, 1024, 1024, 1024, 0, 1024]
    assert read(GEMMA3_4B).eos_token_ids == {1, 106}
    assert len(read(GEMMA3).kinds) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}),
        ({"type": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500000.0}),
        ({"type": "default"}, {"rope_type": "default", "rope_theta": 500000.0}),
        (None, {"rope_theta": 500000.0}),
        ({"rope_type": "linear", "type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "finetuned": True},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
        (LLAMA31["rope_scaling"], {**LLAMA31["rope_scaling"], "rope_theta": 500000.0}),
    ],
)
def test_spellings_of_rope_scaling(old, new):
    theta = ... if "rope_theta" in new else 500000.0
    assert read(LLAMA31, rope_scaling=old) == read(LLAMA31, rope_scaling=..., rope_theta=theta, rope_parameters=new)


def test_phi3_su_is_longrope():
    renamed = {**PHI3["rope_scaling"], "type": "su"}
    assert read(PHI3, rope_scaling=renamed) == read(PHI3)


def test_gemma3_spellings_of_its_layers():
    types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(26)]
    assert read(GEMMA3, sliding_window_pattern=..., layer_types=types) == read(GEMMA3)
    assert read(GEMMA3, sliding_window_pattern=...) == read(GEMMA3)
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    new = read(GEMMA3, rope_theta=..., rope_local_base_freq=..., rope_scaling=..., rope_parameters=ropes)
    assert new == read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [kind.rope.kind for kind in new.layer_kinds[4:6]] == ["default", "linear"]


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (LLAMA31, {"architectures": ["LlamaForSequenceClassification"]}, "architectures is LlamaForSequenceClassific"),
        (LLAMA31, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks rope_scaling.low_freq_factor"),
        (LLAMA31, {"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 3.0}}, "rope_scaling.attn_factor"),
        (LLAMA31, {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "mrope"),
        (LLAMA31, {"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        (LLAMA31, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA31, {"attention_bias": "yes"}, "attention_bias is yes"),
        (LLAMA31, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method is gptq"),
        (MISTRAL, {"sliding_window": -1}, "sliding_window is -1"),
        (MISTRAL, {"layer_types": ["sliding_attention", "full_attention"] * 16}, "layer_types"),
        (QWEN25, {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 28},
         "sliding_window is None"),
        (QWEN25, {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        (QWEN25, {"layer_types": ["full_attention"] * 27}, "28 times"),
        (GEMMA2, {"hidden_activation": "relu"}, "hidden_activation is relu"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
        (GEMMA3_4B, {"text_config": ...}, "lacks text_config"),
        (PHI3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is linear"),
        (PHI3, {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "48 positive"),
        (PHI3, {"partial_rotary_factor": 0.99}, "even number of the 96"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused_by_name(config, changes, named):
    with pytest.raises(ConfigError) as caught:
        read(config, **changes)
    assert named in caught.value.message
    assert caught.value.field == "model"


def test_every_architecture_is_among_the_published_ones():
    assert {config["architectures"][0] for config in PUBLISHED.values()} == set(ARCHITECTURES)
