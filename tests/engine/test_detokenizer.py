"""Incremental detokenization equals decoding the whole, for every kind of vocabulary and any sequence of tokens."""

from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from twostroke.engine.detokenizer import Detokenizer
from twostroke.engine.token_texts import Joining
from twostroke.engine.tokenizer import Tokenizer

TEXTS = [
    "Hello, world! It's 12 o'clock; don't panic.",
    "你好，世界！今天天气怎么样？繁體字與简体字",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇳 mixed 🤷🏼‍♀️ end",
    "e\u0301a\u0308 नमस्ते สวัสดี \u202eabc",
    "def f(x):\n\treturn  {'a': 1,   2: [3]}\r\n\n",
    "   leading and trailing   ",
    "",
]


def byte_fallback(*, strip: bool) -> tokenizers.Tokenizer:
    """A small vocabulary of SentencePiece's kind: pieces with U+2581, all bytes, three special tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "a", "e", "▁a", "é", "你", "好", "\n", "in▁g", "<0x", "!", "h", "i"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A vocabulary whose decoder joins by what the next token looks like."""
    pieces = ["[UNK]", "play", "##ing", "##s", "the", "你", ",", "'", "do", "n"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Words that begin with U+2581, the first one's dropped."""
    pieces = ["<unk>", "▁", "▁the", "▁a", "x", "yz", "▁▁", "好"]
    tokenizer = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def plain() -> tokenizers.Tokenizer:
    """No decoder: tokens are joined by spaces."""
    return tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "你": 2, "[U]": 3}, unk_token="[U]"))


@pytest.fixture(scope="session")
def byte_level(tiny: ModuleType) -> tokenizers.Tokenizer:
    """The tiny model's vocabulary with two added tokens that are not special, one of them beyond the byte alphabet."""
    tokenizer: tokenizers.Tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["<tool call>", "按钮"])
    return tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_the_embedded_model(smollm2_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_dir(smollm2_dir)
    parts = stream(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text == tokenizer.decode(tokenizer.encode(text))
    assert not any("\ufffd" in part for part in parts)


def test_characters_come_as_soon_as_they_are_whole(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    assert stream(tokenizer, tokenizer.encode("a你👍")) == ["a", "", "", "你", "", "", "", "👍", ""]


def test_special_tokens(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    ids = tokenizer.encode("<|im_start|>hi<tool call>按钮<|im_end|>")
    assert "".join(stream(tokenizer, ids)) == "hi<tool call>按钮"
    assert "".join(stream(tokenizer, ids, skip_special=False)) == "<|im_start|>hi<tool call>按钮<|im_end|>"


def test_unfinished_and_broken_characters(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level)
    you, good = tokenizer.encode("你"), tokenizer.encode("好")
    assert stream(tokenizer, you[:2]) == ["", "", "\ufffd"]
    assert stream(tokenizer, you[:2] + good) == ["", "", "\ufffd", "", "好", ""]
    assert stream(tokenizer, [*you[1:], *good]) == ["\ufffd", "\ufffd", "", "", "好", ""]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_byte_level_tokens(byte_level: tokenizers.Tokenizer, data: st.DataObject) -> None:
    tokenizer = Tokenizer(byte_level)
    high = [i for i in range(tokenizer.vocab_size) if any(byte >= 0x80 for byte in tokenizer.token_bytes(i))]
    token = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(high))
    ids = data.draw(st.lists(token, max_size=40))
    for skip in (True, False):
        assert "".join(stream(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)


@given(st.lists(st.integers(0, 49151), max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_the_embedded_model(smollm2_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(smollm2_tokenizer, ids)) == smollm2_tokenizer.decode(ids)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(smollm2_dir)


@pytest.mark.parametrize("strip", [True, False])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_sequence_with_byte_fallback(strip: bool, data: st.DataObject) -> None:
    tokenizer = Tokenizer(byte_fallback(strip=strip))
    pieces = st.integers(259, tokenizer.vocab_size - 1)
    special = st.integers(0, 2)
    character = st.sampled_from("你👍éñ\u200d").map(lambda text: [3 + byte for byte in text.encode()])
    few_bytes = st.lists(st.integers(3, 258), max_size=7)
    part = st.one_of(pieces.map(lambda i: [i]), special.map(lambda i: [i]), character, few_bytes)
    parts = data.draw(st.lists(part, max_size=20))
    ids = [token_id for index, ids in enumerate(parts) for token_id in ([*ids, 262] if index % 2 else ids)]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text(alphabet="你👍éñ", max_size=40))
@settings(max_examples=50, deadline=None)
def test_long_runs_of_bytes(text: str) -> None:
    """Past the bound a run is decoded as it comes: nothing is held for long, and valid text stays equal."""
    tokenizer = Tokenizer(byte_fallback(strip=True))
    ids = [3 + byte for byte in text.encode()]
    detokenizer = Detokenizer(tokenizer)
    told = ""
    for count, token_id in enumerate(ids, start=1):
        told += detokenizer.push(token_id)
        assert count - len(told.encode()) <= 16
    assert told + detokenizer.flush() == text == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [word_piece, metaspace, plain])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequence_with_other_decoders(make: object, data: st.DataObject) -> None:
    tokenizer = Tokenizer(make())  # type: ignore[operator]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_kinds_are_told_apart(byte_level: tokenizers.Tokenizer) -> None:
    kinds = {
        Joining.BYTE_LEVEL: [byte_level],
        Joining.BYTE_FALLBACK: [byte_fallback(strip=True), byte_fallback(strip=False)],
        Joining.OTHER: [word_piece(), metaspace(), plain()],
    }
    for kind, made in kinds.items():
        assert all(Tokenizer(tokenizer).texts.joining is kind for tokenizer in made)
    assert Tokenizer(byte_fallback(strip=True)).texts.strips_space


def test_padding_ids_have_no_text(byte_level: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level, vocab_size=1000)
    assert stream(tokenizer, [999, *tokenizer.encode("hi"), 998]) == ["", "h", "i", "", ""]


def test_the_window_stays_small() -> None:
    detokenizer = Detokenizer(Tokenizer(word_piece()))
    for step in range(2000):
        detokenizer.push(step % 10)
        window = detokenizer._joiner
        assert len(window._context) + len(window._held) <= 16  # type: ignore[attr-defined]


def test_special_tokens_that_are_shown(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_llama_dir)
    ids = [0, 50, 1, 51, 2]
    for skip, shown, names in ((True, (), ()), (True, (1,), (1,)), (False, (), (0, 1, 2)), (False, (1,), (0, 1, 2))):
        stream = Detokenizer(tokenizer, skip_special=skip, shown=shown)
        text = "".join(map(stream.push, ids)) + stream.flush()
        assert text == "".join(tokenizer.token_text(token) for token in ids if token > 2 or token in names)
