"""Small GGUF files for tests, written from a checkpoint as llama.cpp's conversion writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file


def permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K as llama.cpp's convert_hf_to_gguf.py writes them."""
    rows = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, rows, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, model: Path, quantize: gguf.GGMLQuantizationType | None = None, **changes: Any) -> Path:
    """A GGUF file of a checkpoint. `changes`: metadata keys (dots as __) to set, or to leave out (None);
    `without`, `extra`: tensors to leave out or add."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    without, extra = changes.pop("without", ()), changes.pop("extra", {})
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    metadata: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.freq_base": config["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(vocabulary) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            kinds[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if "q_proj" in name or "k_proj" in name:
            tensor = permute(tensor, heads if "q_proj" in name else kv_heads)
        data = tensor.float().numpy()
        if target not in without and quantize is not None and data.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(data, quantize), raw_dtype=quantize)
        elif target not in without:
            writer.add_tensor(target, data)
    for name, data in extra.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
