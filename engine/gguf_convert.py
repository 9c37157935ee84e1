"""Turns a GGUF file into a model directory in the Hugging Face layout."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ..errors import ConfigError
from .gguf_file import Floats, GgufFile
from .gguf_tokenizer import MAX_TOKENS, GgufVocabulary
from .safetensors_file import TensorSpec, write_safetensors

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (stage, done, total); total is 0 while unknown."""

WeightType = Literal["bfloat16", "float32"]
_DTYPES: dict[WeightType, str] = {"bfloat16": "BF16", "float32": "F32"}

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Sizes(NamedTuple):
    """The model's sizes, from the metadata."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int


class _Move(NamedTuple):
    """One tensor's way: GGUF name, target and shape; `rotary_heads` > 0: its rows must be put back in order."""

    source: str
    target: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


def convert(gguf_path: Path, out_dir: Path, dtype: WeightType = "bfloat16", progress: Progress | None = None) -> Path:
    """Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors.

    `out_dir` is made if missing, files of these names in it are replaced. Takes about the GGUF's dequantised size in
    time (1 s for 100 million weights) but little memory. Returns `out_dir`.
    Raises ConfigError for an unsupported architecture, tokenizer or tensor type, and for a damaged file.
    """
    gguf = GgufFile(gguf_path)
    architecture = gguf.get("general.architecture", str)
    if architecture != "llama":
        raise gguf.wrong(f"architecture {architecture!r} is not supported; supported: 'llama'")
    sizes = _sizes(gguf)
    vocabulary = GgufVocabulary(gguf)
    if len(vocabulary.tokens) > sizes.vocabulary:
        raise gguf.wrong(f"{len(vocabulary.tokens)} tokens, but embeddings for {sizes.vocabulary}")
    moves = _moves(gguf, sizes)
    specs = [TensorSpec(move.target, _DTYPES[dtype], move.shape) for move in moves]
    ends = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.end_ids, "pad_token_id": vocabulary.pad_id}
    texts = {  # made first: what is wrong with them should show before the long part
        "tokenizer.json": vocabulary.tokenizer().to_str(),
        "tokenizer_config.json": _json(vocabulary.config(sizes.context)),
        "generation_config.json": _json({key: value for key, value in ends.items() if value is not None}),
        "config.json": _json(_config(gguf, sizes, vocabulary, dtype)),
    }
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        write_safetensors(out_dir / "model.safetensors", specs, _pieces(gguf, moves, dtype, progress))
        for name, text in texts.items():
            _write(out_dir / name, text)
    except OSError as error:
        raise ConfigError(f"cannot write the model to {out_dir}: {error}") from error
    return out_dir


def _sizes(gguf: GgufFile) -> _Sizes:
    heads = gguf.size("llama.attention.head_count", most=4096)
    hidden = gguf.size("llama.embedding_length", most=1 << 17)
    if gguf.has("llama.expert_count") and gguf.get("llama.expert_count", int) > 0:
        raise gguf.wrong("mixtures of experts are not supported")
    scaling = gguf.get("llama.rope.scaling.type", str, "none")
    if scaling != "none":
        raise gguf.wrong(f"rope scaling of type {scaling!r} is not supported")
    head_dim = gguf.size("llama.attention.key_length", hidden // heads or 1, most=4096)
    rotary = gguf.size("llama.rope.dimension_count", head_dim, most=4096)
    kv_heads = gguf.size("llama.attention.head_count_kv", heads, most=heads)
    if head_dim % 2 or rotary != head_dim or heads % kv_heads:
        raise gguf.wrong(f"heads of {head_dim} with {rotary} rotated, {heads} query and {kv_heads} KV heads do not fit")
    embedding = gguf.shape("token_embd.weight")
    if len(embedding) != 2 or not 1 <= embedding[0] <= MAX_TOKENS:
        raise gguf.wrong(f"tensor token_embd.weight has the shape {embedding}")
    return _Sizes(
        layers=gguf.size("llama.block_count", most=1024),
        hidden=hidden,
        inner=gguf.size("llama.feed_forward_length", most=1 << 20),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=embedding[0],
        context=gguf.size("llama.context_length", most=1 << 27),
    )


def _moves(gguf: GgufFile, sizes: _Sizes) -> list[_Move]:
    """Every tensor of the file once, its shape checked; ConfigError for one that is missing or has no place."""
    query, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (sizes.hidden,),
        "attn_q": (query, sizes.hidden),
        "attn_k": (keys, sizes.hidden),
        "attn_v": (keys, sizes.hidden),
        "attn_output": (sizes.hidden, query),
        "ffn_norm": (sizes.hidden,),
        "ffn_gate": (sizes.inner, sizes.hidden),
        "ffn_up": (sizes.inner, sizes.hidden),
        "ffn_down": (sizes.hidden, sizes.inner),
    }
    rotary_heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
    table = (sizes.vocabulary, sizes.hidden)
    moves = [_Move("token_embd.weight", "model.embed_tokens.weight", table)]
    for layer in range(sizes.layers):
        for source, target in _LAYER_TENSORS.items():
            name = f"model.layers.{layer}.{target}.weight"
            moves.append(_Move(f"blk.{layer}.{source}.weight", name, shapes[source], rotary_heads.get(source, 0)))
    moves.append(_Move("output_norm.weight", "model.norm.weight", (sizes.hidden,)))
    if "output.weight" in gguf.tensor_names:
        moves.append(_Move("output.weight", "lm_head.weight", table))
    for move in moves:
        if gguf.shape(move.source) != move.shape:
            raise gguf.wrong(f"tensor {move.source} has the shape {gguf.shape(move.source)}, not {move.shape}")
    strange = sorted(gguf.tensor_names - {move.source for move in moves})
    if strange:
        raise gguf.wrong(f"no place for tensor {strange[0]} in a plain Llama ({len(strange)} such tensors)")
    return moves


def _pieces(gguf: GgufFile, moves: list[_Move], dtype: WeightType, progress: Progress | None) -> Iterator[bytes]:
    """The weights' bytes in the order of `moves`."""
    total = sum(int(np.prod(move.shape)) for move in moves)
    done = 0
    for move in moves:
        if move.rotary_heads:
            parts: Iterator[Floats] = iter([_unpermute(gguf.tensor(move.source), move.rotary_heads)])
        elif len(move.shape) == 1:
            parts = iter([gguf.tensor(move.source)])
        else:
            parts = gguf.rows(move.source)
        for part in parts:
            yield _encode(part, dtype)
            done += part.size
            if progress is not None:
                progress("convert", done, total)


def _unpermute(weights: Floats, heads: int) -> Floats:
    """Rows of Q or K [heads * head_dim, hidden]: GGUF rotates neighbours, Hugging Face the halves of a head.

    Undoes `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _encode(values: Floats, dtype: WeightType) -> bytes:
    """Little-endian bytes; bfloat16 rounds to the nearest, ties to even, as torch does."""
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + (odd + 0x7FFF)) >> 16).astype("<u2").tobytes()


def _config(gguf: GgufFile, sizes: _Sizes, vocabulary: GgufVocabulary, dtype: WeightType) -> dict[str, object]:
    base = _decimal(gguf.get("llama.rope.freq_base", float, 10000.0))
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos_id,
        "dtype": dtype,
        "eos_token_id": vocabulary.eos_id,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "max_position_embeddings": sizes.context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "pad_token_id": vocabulary.pad_id,
        "rms_norm_eps": _decimal(gguf.get("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": {"rope_theta": base, "rope_type": "default"},  # where newer readers look
        "rope_theta": base,  # where older ones do
        "tie_word_embeddings": "output.weight" not in gguf.tensor_names,
        "vocab_size": sizes.vocabulary,
    }
    if not (0 < base < float("inf") and 0 < float(str(config["rms_norm_eps"])) < 1):
        raise gguf.wrong(f"rope base {base} or norm epsilon {config['rms_norm_eps']} makes no sense")
    return config


def _decimal(value: float) -> float:
    """The shortest decimal that means the same fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """On disk when it returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
