"""Tiny random checkpoints of every architecture, written by transformers: `make_model(directory, name)`.

Their windows, original lengths and caps are small, so that short prompts go beyond them. Not a package; see `tiny.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0]}

# name -> (configuration class, its fields beyond the sizes)
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 24, "head_dim": 24}),
    "mistral-whole": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-yarn": (
        "Qwen2Config",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128,
                "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 0.3,
            }
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "gemma2": (
        "Gemma2Config",
        {"num_hidden_layers": 4, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 24,
         "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 24, "rope_parameters": {"partial_rotary_factor": 0.75}}),
    "phi3-long": (
        "Phi3Config",
        {
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.5, "rope_theta": 1e4, **_LONG},
        },
    ),
}  # fmt: skip
WINDOWED = ("mistral", "qwen2-window", "gemma2", "gemma3", "phi3")


def make_config(directory: Path, name: str) -> Path:
    """Writes nothing but config.json into `directory`, and returns that."""
    kind, changes = MODELS[name]
    config = getattr(transformers, kind)(**{**_SIZES, **changes}, architectures=[_architecture(kind)])
    config.save_pretrained(directory)
    return directory


def _architecture(kind: str) -> str:
    return kind.replace("TextConfig", "ForCausalLM").replace("Config", "ForCausalLM")


def make_model(directory: Path, name: str, *, shard: str = "5GB", seed: int = 0) -> transformers.PreTrainedModel:
    """Writes the checkpoint, and returns the model of transformers in float32.

    Random weights at a scale at which layers matter: attention is neither flat nor one-hot, and logits differ by a few.
    `shard`: most bytes of a file. The tokenizer is `tiny.py`'s business.
    """
    kind, changes = MODELS[name]
    # Eager: transformers 5.17 leaves soft caps out of its other implementations.
    config = getattr(transformers, kind)(**{**_SIZES, **changes}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, _architecture(kind))(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in tensor_name or tensor_name.endswith("bias"):
                tensor.add_(noise * 0.2)
                if "gemma" in name and "post_" in tensor_name:
                    tensor.add_(4.0)  # against embeddings times 8, which are also the output matrix
            elif "embed_tokens" in tensor_name or "lm_head" in tensor_name:
                tensor.copy_(noise * 0.4)
            else:
                wide = 1.6 if any(part in tensor_name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
                tensor.copy_(noise * (wide * tensor.shape[1] ** -0.5))
    model.save_pretrained(directory, max_shard_size=shard)
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}), encoding="utf-8")
    return model


def add_tokenizer(directory: Path, tokenizer: Any) -> None:
    """Puts a tokenizer of the `tokenizers` library beside a checkpoint."""
    tokenizer.save(str(directory / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")


def greedy_departures(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """Indices of the output tokens that are not what transformers would take, given all before them."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]  # [outputs, vocabulary]
    return [i for i, (a, b) in enumerate(zip(logits.argmax(-1).tolist(), output, strict=True)) if a != b]
