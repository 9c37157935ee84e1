"""tokenizer.json and tokenizer_config.json from a GGUF file's vocabulary and merges."""

from enum import IntEnum
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .gguf_file import GgufFile

MAX_TOKENS = 1 << 21

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END_OF_TEXT = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>"}
"""Control tokens that end a turn or a text, whatever the metadata say: a model that samples one has finished."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Style(NamedTuple):
    """What `tokenizer.ggml.pre` stands for (llama.cpp names the splitting rules; the file does not hold them)."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    ignore_merges: bool  # whole words of the vocabulary are taken as they are
    add_bos: bool  # unless the file says otherwise


class GgufVocabulary:
    """The tokens of a GGUF file, and the tokenizer that they make."""

    def __init__(self, gguf: GgufFile) -> None:
        """ConfigError where the vocabulary is missing, contradicts itself or is of an unsupported kind."""
        self._gguf = gguf
        model = gguf.get("tokenizer.ggml.model", str)
        if model != "gpt2":
            raise gguf.wrong(f"its tokenizer is of the unsupported kind {model!r}; supported: 'gpt2' (byte-level BPE)")
        self._style = _style(gguf)
        self.tokens = gguf.items("tokenizer.ggml.tokens", str)
        if not 1 <= len(self.tokens) <= MAX_TOKENS:
            raise gguf.wrong(f"its vocabulary has {len(self.tokens)} tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise gguf.wrong("a token occurs twice in its vocabulary")
        self._types = gguf.items("tokenizer.ggml.token_type", int) or [TokenType.NORMAL] * len(self.tokens)
        if len(self._types) != len(self.tokens):
            raise gguf.wrong(f"{len(self._types)} token types for {len(self.tokens)} tokens")

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a text, rising."""
        named = {token_id for name in ("eos", "eot", "eom") if (token_id := self._special(name)) is not None}
        known = {i for i, token in enumerate(self.tokens) if token in _END_OF_TEXT and self._is_added(i)}
        return sorted(named | known)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if any (whether or not it is added to prompts)."""
        return self._special("bos")

    @property
    def eos_id(self) -> int | None:
        """The token that the file names as the end."""
        return self._special("eos")

    @property
    def pad_id(self) -> int | None:
        """The padding token."""
        return self._special("padding")

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer with the file's ids, merges, special tokens and splitting rules."""
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        bpe = models.BPE(vocabulary, self._merges(vocabulary), ignore_merges=self._style.ignore_merges)
        tokenizer = Tokenizer(bpe)
        tokenizer.pre_tokenizer = self._style.pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        for i, token in enumerate(self.tokens):
            if self._is_added(i):
                special = self._types[i] == TokenType.CONTROL
                tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
        bos = self.bos_id
        if bos is not None and self._gguf.get("tokenizer.ggml.add_bos_token", bool, self._style.add_bos):
            first = self.tokens[bos]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[first, "$A"], pair=[first, "$A", first, "$B:1"], special_tokens=[(first, bos)]
            )
        return tokenizer

    def config(self, context_length: int) -> dict[str, object]:
        """The contents of tokenizer_config.json."""
        config: dict[str, object] = {
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_length,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self._special(name)
            if token_id is not None:
                config[f"{key}_token"] = self.tokens[token_id]
        if self._gguf.has("tokenizer.chat_template"):
            config["chat_template"] = self._gguf.get("tokenizer.chat_template", str)
        return config

    def _is_added(self, token_id: int) -> bool:
        return self._types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED)

    def _special(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if not self._gguf.has(key):
            return None
        token_id = self._gguf.get(key, int)
        if not 0 <= token_id < len(self.tokens):
            raise self._gguf.wrong(f"metadata key {key} is {token_id}, outside of the vocabulary")
        return token_id

    def _merges(self, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for text in self._gguf.items("tokenizer.ggml.merges", str):
            left, space, right = text.partition(" ")
            if not space or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
                raise self._gguf.wrong(f"merge {text!r} does not fit its vocabulary")
            merges.append((left, right))
        return merges


def _style(gguf: GgufFile) -> _Style:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    name = gguf.get("tokenizer.ggml.pre", str, "gpt-2")
    if name == "gpt-2":
        return _Style(byte_level, ignore_merges=False, add_bos=False)
    if name == "smollm":  # each digit stands alone, and the spaces before it do not join it
        digits = pre_tokenizers.Digits(individual_digits=True)
        return _Style(pre_tokenizers.Sequence([digits, byte_level]), ignore_merges=False, add_bos=False)
    if name in ("llama-bpe", "llama3", "llama-v3"):
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return _Style(pre_tokenizers.Sequence([split, unsplit]), ignore_merges=True, add_bos=True)
    raise gguf.wrong(
        f"its tokenizer splits text by the unsupported rules {name!r}; supported: gpt-2, smollm, llama-bpe"
    )
