"""The bytes of tokens as the grammar library has them, for each kind of tokenizer."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer
from tokenizers import AddedToken, normalizers

from twostroke.engine.detokenizer import Detokenizer
from twostroke.engine.grammar import compile_grammar, problem
from twostroke.engine.request import Constraint, ConstraintKind
from twostroke.engine.tokenizer import Tokenizer
from twostroke.engine.vocabulary import ENOUGH, make_vocabulary, read_vocabulary
from twostroke.errors import ConfigError

from .fake_runner import allowed_ids
from .test_detokenizer import byte_fallback, metaspace, word_piece

TEXTS = [
    "plain words, and more",
    "  two spaces, a tab\tand\n\nlines ",
    "日本語 и русский, naïve café",
    "😀👩‍👩‍👧 flags 🇩🇪",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # код\n",
    '{"a": [1, 22.5e-3, null], "b": "\\u00e9\\n"}',
    "e\u0301 decomposed, ﬁ ligature",
    "<|im_end|> as text, not as a token",
    "x",
]


def with_special(inner: tokenizers.Tokenizer) -> Tokenizer:
    inner.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return Tokenizer(inner)


def forced(vocabulary: LLTokenizer, text: str) -> list[int]:
    """The tokens of an output that must be this text, each time the first allowed one, without the end."""
    matcher = compile_grammar(vocabulary, Constraint(ConstraintKind.CHOICE, json.dumps([text])))
    ids: list[int] = []
    while not matcher.is_stopped():
        allowed = allowed_ids(np.frombuffer(matcher.compute_bitmask(), np.int32))
        assert allowed, (text, ids, problem(matcher))
        assert matcher.consume_token(allowed[0]), problem(matcher)
        ids.append(allowed[0])
    assert problem(matcher) is None
    return ids


@pytest.fixture(params=[pytest.param("smollm2", marks=pytest.mark.slow), "tiny", "nfc", "sentencepiece", "gemma"])
def tokenizer(request: pytest.FixtureRequest, tiny: ModuleType) -> Tokenizer:
    """GPT-2's bytes from GGUF, with a normalizer too; bytes for want of tokens, with and without a first space."""
    if request.param == "smollm2":
        return Tokenizer.from_dir(request.getfixturevalue("smollm2_dir"))
    if request.param in ("tiny", "nfc"):
        inner = tiny.make_tokenizer()
        if request.param == "nfc":
            inner.normalizer = normalizers.NFC()
        return Tokenizer(inner)
    inner = byte_fallback(strip=request.param == "sentencepiece")
    if request.param == "gemma":
        inner.normalizer = normalizers.Replace(" ", "▁")
    return with_special(inner)


def test_tokens_bytes_make_up_the_text(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.special_ids)
    vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size, [end])
    for text in TEXTS:
        ids = tokenizer.encode_plain(text)
        if tokenizer.special_ids.isdisjoint(ids):
            raw = b"".join(tokenizer.token_bytes(token) for token in ids)
            assert vocabulary.decode_bytes(ids) == raw
            assert tokenizer.decode(ids).strip() in (raw.decode().strip(), text.strip())


def test_a_text_that_must_come_comes_byte_for_byte_and_without_special_tokens(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.special_ids)
    vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size, [end])
    for text in TEXTS:
        ids = forced(vocabulary, text)
        assert tokenizer.special_ids.isdisjoint(ids), text
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode(), text
        stream = Detokenizer(tokenizer, strip_space=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == text


@pytest.mark.slow
def test_a_forced_text_is_tokenized_as_the_model_would(smollm2_dir: Path) -> None:
    tokenizer, vocabulary = Tokenizer.from_dir(smollm2_dir), read_vocabulary(smollm2_dir)
    for text in TEXTS[:5]:
        assert forced(vocabulary, text) == tokenizer.encode_plain(text)
    long = "many words of a text that is long, " * (ENOUGH // 12)
    assert forced(vocabulary, long) == tokenizer.encode_plain(long)


def test_ids_beyond_the_tokenizer_have_no_bytes(tiny: ModuleType) -> None:
    tokenizer = Tokenizer(tiny.make_tokenizer())
    vocabulary = make_vocabulary(tokenizer, 1000, [0, 2])
    assert vocabulary.vocab_size == 1000
    assert (vocabulary.eos_tokens, vocabulary.is_special_token(1)) == ([0, 2], True)
    matcher = compile_grammar(vocabulary, Constraint(ConstraintKind.REGEX, r"(.|\n)*"))
    allowed = allowed_ids(np.frombuffer(matcher.compute_bitmask(), np.int32))
    assert {0, 2} <= set(allowed)
    assert 1 not in allowed
    assert max(allowed) < tokenizer.vocab_size


def test_what_cannot_be_constrained(tiny: ModuleType) -> None:
    for inner in (metaspace(), word_piece()):
        with pytest.raises(ConfigError, match="bytes"):
            make_vocabulary(Tokenizer(inner), 100, [0])
    with pytest.raises(ConfigError, match="end-of-text"):
        make_vocabulary(Tokenizer(tiny.make_tokenizer()), 300, [])
