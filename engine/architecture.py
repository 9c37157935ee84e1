"""What each supported architecture does otherwise than Llama: one entry a family, no code. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Windows = Literal["none", "all", "upper", "pattern"]
"""Which layers look at a sliding window only: `all` of them if the configuration has one; those `upper` ones from
max_window_layers on if use_sliding_window; by a repeating `pattern` of which the last layer sees everything. For the
last two, `layer_types`, where given, says it layer by layer."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family. Source: its modelling file in `transformers`."""

    qkv_bias: bool | None = None  # None: the field attention_bias says
    o_bias: bool | None = None  # None: the field attention_bias says
    mlp_bias: bool | None = False  # None: the field mlp_bias says
    fused: bool = False  # the checkpoint has qkv_proj and gate_up_proj, fused as the decoder wants them
    qk_norm: bool = False  # query and key heads are normalised before they are rotated
    post_norms: bool = False  # what attention and MLP add to the stream is normalised, too
    norm_offset: float = 0.0  # norms multiply by weight + this
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    activation: str = "hidden_act"  # the field that names it
    query_scalar: bool = False  # scores are scaled by query_pre_attn_scalar^-0.5, not head_dim^-0.5
    attention_cap: bool = False  # scores are capped softly at attn_logit_softcapping
    final_cap: bool = False  # logits are capped softly at final_logit_softcapping
    windows: Windows = "none"
    pattern: int = 0  # layers a turn of a window pattern; a field sliding_window_pattern goes first
    local_rope: bool = False  # windowed layers have a rotation of their own
    partial_rotary: bool = False
    ropes: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    part: str = ""  # the object within config.json that describes the decoder
    refused: tuple[str, ...] = ()  # fields that must be absent, null or false
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what is meant where config.json says nothing


_GEMMA_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
}
_GEMMA2 = Architecture(
    post_norms=True,
    norm_offset=1.0,
    scaled_embedding=True,
    activation="hidden_activation",
    query_scalar=True,
    attention_cap=True,
    final_cap=True,
    windows="pattern",
    pattern=2,
    refused=("use_bidirectional_attention",),
    defaults=_GEMMA_SIZES
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_GEMMA3: dict[str, Any] = {
    "qk_norm": True,
    "post_norms": True,
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "activation": "hidden_activation",
    "query_scalar": True,
    "final_cap": True,
    "windows": "pattern",
    "pattern": 6,
    "local_rope": True,
    "refused": ("use_bidirectional_attention", "attn_logit_softcapping"),
    "defaults": _GEMMA_SIZES
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(mlp_bias=None),
    "MistralForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        windows="all",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, o_bias=False, windows="upper", defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, windows="upper", defaults=_QWEN_DEFAULTS | {"head_dim": 128}),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": Architecture(**_GEMMA3),
    "Gemma3ForConditionalGeneration": Architecture(**_GEMMA3, part="text_config"),  # its text part
    "Phi3ForCausalLM": Architecture(
        qkv_bias=False,
        o_bias=False,
        fused=True,
        windows="all",
        partial_rotary=True,
        ropes=("default", "longrope"),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
}
