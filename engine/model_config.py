"""What a model's `config.json` says, checked and in our terms. No torch here: the gateway reads it too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .architecture import ARCHITECTURES, Architecture
from .config_fields import Fields
from .layer_kinds import LayerKind, read_kinds

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one decoder. Source: the Hugging Face `config.json` and `generation_config.json`."""

    architecture: str
    family: Architecture  # what holds for all models of that architecture
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int  # query heads
    kv_heads: int  # divides `heads`
    head_dim: int
    vocab_size: int
    context_length: int  # positions that can be served
    norm_eps: float
    tied: bool  # the output matrix is the embedding table
    activation: Activation
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    layer_kinds: tuple[LayerKind, ...]  # one a layer
    attention_scale: float  # of the scores
    attention_cap: float  # soft bound of the scores; 0: none
    final_cap: float  # soft bound of the logits; 0: none
    eos_token_ids: frozenset[int]
    bos_token_id: int | None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that occur, each once."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read a model directory. Raises ConfigError naming the file or the field."""
        generation = path / "generation_config.json"
        return cls.from_dicts(_read(path / "config.json"), _read(generation) if generation.exists() else {})

    @classmethod
    def from_dicts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> "ModelConfig":
        """The same from parsed files; stop tokens of `generation` win over those of `config`."""
        name = _architecture(config)
        family = ARCHITECTURES[name]
        fields = _fields(config, family)
        _refuse_unsupported(fields, family)
        layers, heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
        kv_heads, hidden_size = fields.size("num_key_value_heads", heads), fields.size("hidden_size")
        head_dim = fields.size("head_dim", max(1, hidden_size // heads))
        if heads % kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim is {head_dim}; supported: an even number", field="model")
        kinds = read_kinds(fields, family, layers=layers, head_dim=head_dim)
        eos = generation.get("eos_token_id")
        bias = fields.flag("attention_bias")
        scalar = fields.positive("query_pre_attn_scalar", head_dim) if family.query_scalar else head_dim
        return cls(
            architecture=name,
            family=family,
            layers=layers,
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=fields.size("vocab_size"),
            context_length=_context_length(fields, kinds),
            norm_eps=fields.positive("rms_norm_eps", 1e-6),
            tied=fields.flag("tie_word_embeddings"),
            activation=_ACTIVATIONS[fields.get(family.activation) or "silu"],
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            mlp_bias=fields.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
            layer_kinds=kinds,
            attention_scale=scalar**-0.5,
            attention_cap=fields.maybe_positive("attn_logit_softcapping") if family.attention_cap else 0.0,
            final_cap=fields.maybe_positive("final_logit_softcapping") if family.final_cap else 0.0,
            eos_token_ids=_token_ids("eos_token_id", fields.get("eos_token_id") if eos is None else eos),
            bos_token_id=_token_id(fields, "bos_token_id"),
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: not a model directory", field="model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object", field="model")
    return content


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: architectures is {architecture}; supported: {', '.join(ARCHITECTURES)}", field="model"
        )
    return architecture


def _fields(config: Mapping[str, Any], family: Architecture) -> Fields:
    """The fields, the family's defaults behind them. Those of a part go before the whole's, but for special tokens."""
    if not family.part:
        return Fields({**family.defaults, **config})
    part = Fields(config).below(family.part)
    if part is None:
        raise ConfigError(f"config.json lacks {family.part}", field="model")
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None}
    return Fields({**family.defaults, **config, **config[family.part], **tokens}, f"{family.part}.")


def _refuse_unsupported(fields: Fields, family: Architecture) -> None:
    """Settings that would change the result and that the decoder does not know must not pass silently."""
    if (fields.get(family.activation) or "silu") not in _ACTIVATIONS:
        raise fields.wrong(family.activation, ", ".join(_ACTIVATIONS))
    quantisation = fields.below("quantization_config")
    if quantisation is not None:
        raise quantisation.wrong("quant_method", "unquantised weights")
    for field in family.refused:
        if fields.get(field):
            raise fields.wrong(field, "null or false for this architecture")


def _context_length(fields: Fields, kinds: tuple[LayerKind, ...]) -> int:
    """max_position_embeddings, unless a rotation reaches less far, or (yarn) farther."""
    context = fields.size("max_position_embeddings", 2048)
    ropes = {kind.rope for kind in kinds}
    stretched = [int(rope.factor * rope.original) for rope in ropes if rope.kind == "yarn"]
    return min([max([context, *stretched]), *(rope.limit for rope in ropes if rope.limit)])


def _token_ids(field: str, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"config.json: {field} is {value}; supported: a token id or a list of them", field="model")
    return frozenset(ids)


def _token_id(fields: Fields, field: str) -> int | None:
    value = fields.get(field)
    if value is not None and not isinstance(value, int):
        raise fields.wrong(field, "a token id")
    return value
