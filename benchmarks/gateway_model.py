"""A model's folder for a gateway under test: a byte-level tokenizer and no weights, made in place of downloaded."""

import json
from pathlib import Path

from packed_worker import FIRST_NUMBER
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = "the gateway on one core and what feeds it on the other so that neither has to wait for long"
END = "<|end|>"
VOCABULARY = 49_152  # as small models have it; a stream is named by a token
CONTEXT = 1 << 20  # in which no stream ends
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def make_model(folder: Path) -> list[int]:
    """Fills the folder; returns the tokens of a text, a word each."""
    pieces = [END, *(f"<{number}>" for number in range(1, FIRST_NUMBER)), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [f"\u0120{word}" for word in TEXT.split()]
    pieces += list(dict.fromkeys(words))
    pieces += [f"\u0120w{number}" for number in range(VOCABULARY - len(pieces))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return [vocabulary[word] for word in words]
