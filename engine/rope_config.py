"""Rotary position embedding as a `config.json` describes it, in every spelling. No torch."""

import math
from dataclasses import dataclass

from .config_fields import Fields, is_number

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_KNOWN = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor"),  # llama3
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "finetuned"),  # yarn
    *("short_factor", "long_factor"),  # longrope
}


@dataclass(frozen=True, slots=True)
class Rope:
    """How the heads of a layer are rotated. `rope_scaling.py` makes frequencies of it.

    dynamic (NTK) and longrope change all frequencies of a sequence when it outgrows the length trained on, those of
    keys already cached too. A page of the cache would then depend on how long its sequence became. So both are served
    up to that length (`limit`), where they equal `transformers`, and not beyond: dynamic as plain rotation, longrope
    with its short factors.
    """

    theta: float
    dim: int  # first elements of a head that are rotated, even
    kind: str = "default"  # one of KINDS
    factor: float = 1.0
    original: int = 0  # llama3, yarn: positions trained on before the scaling
    low: float = 0.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 0.0  # llama3: high_freq_factor; yarn: beta_fast
    truncate: bool = True  # yarn: its ramp begins and ends at whole dimensions
    divisors: tuple[float, ...] = ()  # longrope: one a frequency
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    limit: int = 0  # positions from here on cannot be served; 0: it sets no limit


def read_rope(rope: Fields, config: Fields, *, theta: float, head_dim: int, context: int, partial: bool) -> Rope:
    """Read one rotation.

    `rope`: the object with its parameters (`rope_parameters`, `rope_scaling`, or a layer type's part of it); `config`:
    the whole; `theta`: the base where `rope` has none; `context`: max_position_embeddings; `partial`: whether the
    architecture knows a partial rotation. Raises ConfigError for what is not supported.
    """
    for field in rope:
        if field not in _KNOWN:
            raise rope.wrong(field, "no such field")
    kind = _kind(rope)
    dim = _rotated(rope, config, head_dim, partial)
    theta = rope.positive("rope_theta", theta)
    original = config.maybe_size("original_max_position_embeddings") or rope.size(
        "original_max_position_embeddings", context
    )
    if kind == "linear":
        return Rope(theta, dim, kind, factor=rope.positive("factor"))
    if kind == "dynamic":
        rope.positive("factor")
        return Rope(theta, dim, kind, limit=context)
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor ({low})")
        return Rope(theta, dim, kind, factor=rope.positive("factor"), original=original, low=low, high=high)
    if kind == "yarn":
        return _yarn(rope, theta, dim, original, context)
    if kind == "longrope":
        return _longrope(rope, theta, dim, original, context)
    return Rope(theta, dim)


def _kind(rope: Fields) -> str:
    field = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(field) or "default"
    kind = {"su": "longrope"}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise rope.wrong(field, ", ".join(KINDS))
    return str(kind)


def _rotated(rope: Fields, config: Fields, head_dim: int, partial: bool) -> int:
    place = rope if rope.get("partial_rotary_factor") is not None else config
    share = place.positive("partial_rotary_factor", 1.0)
    if share > 1.0 or (share != 1.0 and not partial):
        raise place.wrong("partial_rotary_factor", "a number up to 1" if partial else "1.0 for this architecture")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise place.wrong("partial_rotary_factor", f"an even number of the {head_dim} elements of a head")
    return dim


def _yarn(rope: Fields, theta: float, dim: int, original: int, context: int) -> Rope:
    """Source: Peng et al., YaRN (2023); with DeepSeek's `mscale`, as transformers has it."""
    factor = rope.positive("factor", context / original)
    scale, scale_all = rope.maybe_positive("mscale"), rope.maybe_positive("mscale_all_dim")
    attention = rope.maybe_positive("attention_factor")
    if not attention and scale and scale_all:
        attention = _magnitude(factor, scale) / _magnitude(factor, scale_all)
    return Rope(
        theta,
        dim,
        "yarn",
        factor=factor,
        original=original,
        low=rope.positive("beta_slow", 1.0),
        high=rope.positive("beta_fast", 32.0),
        truncate=rope.flag("truncate", True),
        attention_factor=attention or _magnitude(factor, 1.0),
    )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: Fields, theta: float, dim: int, original: int, context: int) -> Rope:
    """Source: Ding et al., LongRoPE (2024), within the length trained on."""
    factor = rope.positive("factor", context / original)
    grown = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
    divisors = _numbers(rope, "short_factor", dim // 2)
    _numbers(rope, "long_factor", dim // 2)
    return Rope(
        theta,
        dim,
        "longrope",
        divisors=divisors,
        attention_factor=rope.positive("attention_factor", grown),
        limit=min(original, context),
    )


def _numbers(rope: Fields, field: str, count: int) -> tuple[float, ...]:
    values = rope.get(field)
    if not isinstance(values, list) or len(values) != count or not all(is_number(v) and v > 0 for v in values):
        raise rope.wrong(field, f"{count} positive numbers")
    return tuple(float(v) for v in values)
