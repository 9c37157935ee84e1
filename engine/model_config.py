"""What a model's `config.json` says, checked and in our terms. No torch here: the gateway reads it too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one decoder. Source: the Hugging Face `config.json` and `generation_config.json`."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int  # query heads
    kv_heads: int  # divides `heads`
    head_dim: int
    vocab_size: int
    context_length: int  # positions that the rotary embedding was trained for
    norm_eps: float
    rope_theta: float
    tied: bool  # the output matrix is the embedding table
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read a model directory. Raises ConfigError naming the file or the field."""
        generation = path / "generation_config.json"
        return cls.from_dicts(_read(path / "config.json"), _read(generation) if generation.exists() else {})

    @classmethod
    def from_dicts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> "ModelConfig":
        """The same from parsed files; stop tokens of `generation` win over those of `config`."""
        architecture = _architecture(config)
        _refuse_unsupported(config)
        heads = _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", heads)
        hidden_size = _size(config, "hidden_size")
        head_dim = _size(config, "head_dim", hidden_size // heads)
        if heads % kv_heads:
            raise _wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        if head_dim % 2 or head_dim == 0:
            raise _wrong("head_dim", head_dim, "an even number")
        eos = generation.get("eos_token_id")
        return cls(
            architecture=architecture,
            layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_size(config, "vocab_size"),
            context_length=_size(config, "max_position_embeddings", 2048),
            norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=_token_ids("eos_token_id", config.get("eos_token_id") if eos is None else eos),
            bos_token_id=_token_id(config, "bos_token_id"),
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
        raise _wrong("architectures", architecture, " or ".join(ARCHITECTURES))
    return architecture


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Settings that would change the result and that the decoder does not know must not pass silently."""
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise _wrong("hidden_act", activation, "silu")
    if (method := (config.get("quantization_config") or {}).get("quant_method")) is not None:
        raise _wrong("quantization_config.quant_method", method, "unquantised weights")
    if (factor := _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise _wrong("partial_rotary_factor", factor, "1.0")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings: `rope_parameters` (transformers 5), else `rope_scaling` (transformers 4), else nothing."""
    for name in ("rope_parameters", "rope_scaling"):
        if (rope := config.get(name)) is not None:
            if not isinstance(rope, dict):
                raise _wrong(name, rope, "an object")
            return rope
    return {}


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = _rope(config)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise _wrong("rope_type", scaling, "default (no scaling)")
    return _positive(rope, "rope_theta") if "rope_theta" in rope else _positive(config, "rope_theta", 10000.0)


def _token_ids(field: str, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise _wrong(field, value, "a token id or a list of them")
    return frozenset(ids)


def _token_id(config: Mapping[str, Any], field: str) -> int | None:
    value = config.get(field)
    if value is not None and not isinstance(value, int):
        raise _wrong(field, value, "a token id")
    return value


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json lacks {field}", field="model")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(field, value, "a positive integer")
    return value


def _positive(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise _wrong(field, value, "a positive number")
    return float(value)


def _wrong(field: str, got: object, takes: str) -> ConfigError:
    return ConfigError(f"config.json: {field} is {got}; supported: {takes}", field="model")
