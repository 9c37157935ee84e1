"""A tiny random Llama checkpoint with a small tokenizer, in the Hugging Face layout: for tests and benchmarks.

Not a package: load it through the fixtures of `tests/engine/conftest.py`, or by path
(`importlib.util.spec_from_file_location("tiny", ".../tests/tiny.py")`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = "the and ing er ion to of is you that it he for was on are as with his they at be this from have or by one had"


def make_tokenizer(more: Mapping[str, bool] = MappingProxyType({})) -> Tokenizer:
    """Byte-level BPE: three special tokens (ids 0-2), the 256 bytes, and some merges (about 300 tokens).

    `more`: further tokens, and whether they are special.
    """
    pieces = list(SPECIALS) + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        left = "Ġ"
        for letter in word:
            if left + letter not in pieces:
                pieces.append(left + letter)
                merges.append((left, letter))
            left += letter
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIALS])
    for piece, special in more.items():
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(piece, special=special, normalized=False)])
    return tokenizer


def make_tiny_llama(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    chat_template: str = CHAT_TEMPLATE,
    more_tokens: Mapping[str, bool] = MappingProxyType({}),
) -> Path:
    """Writes the checkpoint into `directory` (made if missing) and returns it. The arguments fix the weights.

    Scaled so that the logits' spread is about 4: greedy choices are clear, sampled ones vary.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(more_tokens)
    vocab, inner, width = tokenizer.get_vocab_size(), 2 * hidden, hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)

    tensors = {"model.embed_tokens.weight": normal(vocab, hidden, 0.5), "model.norm.weight": norm()}
    if not tied:
        tensors["lm_head.weight"] = normal(vocab, hidden, 0.5)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = norm()
        tensors[at + "post_attention_layernorm.weight"] = norm()
        tensors[at + "self_attn.q_proj.weight"] = normal(heads * width, hidden, 2 * hidden**-0.5)
        tensors[at + "self_attn.k_proj.weight"] = normal(kv_heads * width, hidden, 2 * hidden**-0.5)
        tensors[at + "self_attn.v_proj.weight"] = normal(kv_heads * width, hidden, hidden**-0.5)
        tensors[at + "self_attn.o_proj.weight"] = normal(hidden, heads * width, hidden**-0.5)
        tensors[at + "mlp.gate_proj.weight"] = normal(inner, hidden, hidden**-0.5)
        tensors[at + "mlp.up_proj.weight"] = normal(inner, hidden, hidden**-0.5)
        tensors[at + "mlp.down_proj.weight"] = normal(hidden, inner, inner**-0.5)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def write(name: str, content: dict[str, object]) -> None:
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")

    write(
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 1,
            "dtype": str(dtype).removeprefix("torch."),
            "eos_token_id": 2,
            "head_dim": width,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "max_position_embeddings": context,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "rope_theta": 10000.0,
            "tie_word_embeddings": tied,
            "vocab_size": vocab,
        },
    )
    write("generation_config.json", {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": 2})
    write(
        "tokenizer_config.json",
        {
            "bos_token": "<|im_start|>",
            "chat_template": chat_template,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": context,
            "pad_token": "<|im_end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
