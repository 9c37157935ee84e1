"""What may differ from layer to layer: the sliding window and the rotation. No torch."""

from dataclasses import dataclass

from ..errors import ConfigError
from .architecture import Architecture
from .config_fields import Fields
from .rope_config import Rope, read_rope

_FULL, _SLIDING = "full_attention", "sliding_attention"  # as transformers calls them


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one kind share the positions' angles and the plan of attention."""

    rope: Rope
    window: int = 0  # tokens that a token sees, itself counted in; 0: all before it


def read_kinds(fields: Fields, family: Architecture, *, layers: int, head_dim: int) -> tuple[LayerKind, ...]:
    """The kind of each layer. Raises ConfigError for what is not supported."""
    windows = _windows(fields, family, layers)
    rope = _read(fields, family, head_dim)
    local = _read_local(fields, family, head_dim) if family.local_rope else rope
    return tuple(LayerKind(local if window else rope, window) for window in windows)


def _windows(fields: Fields, family: Architecture, layers: int) -> list[int]:
    if family.windows == "none":
        return [0] * layers
    window = fields.maybe_size("sliding_window")
    if family.windows == "all":
        if window and _FULL in (fields.get("layer_types") or []):
            raise fields.wrong("layer_types", "null for this architecture")
        return [window] * layers
    if family.windows == "upper":
        window = window if fields.flag("use_sliding_window") else 0
        first = fields.get("max_window_layers")
        if not isinstance(first, int):
            raise fields.wrong("max_window_layers", "a number of layers")
        types = [_SLIDING if window and i >= first else _FULL for i in range(layers)]
    else:
        turn = fields.size("sliding_window_pattern", family.pattern) if family.local_rope else family.pattern
        types = [_SLIDING if (i + 1) % turn else _FULL for i in range(layers)]
    types = _layer_types(fields, layers) or types
    if _SLIDING in types and not window:
        raise fields.wrong("sliding_window", "a positive integer (and use_sliding_window) with sliding layers")
    return [window if kind == _SLIDING else 0 for kind in types]


def _layer_types(fields: Fields, layers: int) -> list[str]:
    types = fields.get("layer_types")
    if types is None:
        return []
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise fields.wrong("layer_types", f"{layers} times {_FULL} or {_SLIDING}")
    return types


def _read(fields: Fields, family: Architecture, head_dim: int) -> Rope:
    """The rotation of all layers, or of those that see everything.

    transformers 4 wrote `rope_scaling` beside `rope_theta`, transformers 5 writes `rope_parameters`; where there are
    both, transformers 5 reads the former.
    """
    old, new = fields.below("rope_scaling"), fields.below("rope_parameters")
    if family.local_rope and new is not None:
        if not set(new) <= {_FULL, _SLIDING}:
            raise fields.wrong("rope_parameters", f"an object for each of {_FULL} and {_SLIDING}")
        new = new.below(_FULL)
    return _checked(old or new or Fields({}), fields, family, head_dim, fields.positive("rope_theta", 10_000.0))


def _read_local(fields: Fields, family: Architecture, head_dim: int) -> Rope:
    new = fields.below("rope_parameters")
    rope = new.below(_SLIDING) if new is not None else None
    theta = fields.positive("rope_local_base_freq", 10_000.0)
    return _checked(rope or Fields({}), fields, family, head_dim, theta)


def _checked(rope: Fields, fields: Fields, family: Architecture, head_dim: int, theta: float) -> Rope:
    context = fields.size("max_position_embeddings", 2048)
    found = read_rope(rope, fields, theta=theta, head_dim=head_dim, context=context, partial=family.partial_rotary)
    if found.kind not in family.ropes:
        raise ConfigError(
            f"config.json: rope_type is {found.kind}; supported for this architecture: {', '.join(family.ropes)}",
            field="model",
        )
    return found
