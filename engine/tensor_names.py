"""The tensors that a decoder needs of a checkpoint: their names, their shapes, and what they become. No torch."""

from dataclasses import dataclass

from .architecture import Architecture
from .model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer: its field in LayerWeights, and what the checkpoint fuses into it or keeps apart."""

    name: str
    stored: tuple[str, ...]
    rows: tuple[int, ...]  # of each of `stored`
    columns: int
    bias: bool


def matrices(config: ModelConfig) -> list[Matrix]:
    """Those of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    if config.family.fused:
        qkv, gate_up = {"self_attn.qkv_proj": q + 2 * kv}, {"mlp.gate_up_proj": 2 * inner}
    return [
        Matrix("qkv", tuple(qkv), tuple(qkv.values()), hidden, config.qkv_bias),
        Matrix("o", ("self_attn.o_proj",), (hidden,), q, config.o_bias),
        Matrix("gate_up", tuple(gate_up), tuple(gate_up.values()), hidden, config.mlp_bias),
        Matrix("down", ("mlp.down_proj",), (hidden,), inner, config.mlp_bias),
    ]


def norms(family: Architecture) -> dict[str, str]:
    """A layer's norms over the stream: field in LayerWeights, name in the checkpoint."""
    if family.post_norms:
        return {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    return {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Each tensor that the decoder needs, with its shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}.weight": (hidden,) for name in norms(config.family).values()}
        if config.family.qk_norm:
            shapes |= {f"{at}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        for matrix in matrices(config):
            for name, rows in zip(matrix.stored, matrix.rows, strict=True):
                shapes[f"{at}{name}.weight"] = (rows, matrix.columns)
                if matrix.bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
    return shapes
