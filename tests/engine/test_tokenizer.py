"""The tokenizer on its own: what it adds, what it refuses, what a token's text is."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
from tokenizers import processors

from twostroke.engine.chat_template import ChatTemplate
from twostroke.engine.tokenizer import Tokenizer
from twostroke.errors import ConfigError, InvalidRequest


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(smollm2_dir)


def test_the_embedded_model(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.has_chat_template
    assert smollm2.encode("") == []
    assert smollm2.encode("a  12") == [81, 256, 33, 34]
    assert smollm2.encode("<|im_start|>hi") == [1, *smollm2.encode("hi")]  # and no token of its own before
    prompt = smollm2.encode_chat([{"role": "user", "content": "hi"}])
    assert len(prompt) == 31
    assert smollm2.decode(prompt, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.decode([1, 81, 2, 0]) == "a"


def test_special_tokens_are_added_as_the_file_says(tiny: ModuleType) -> None:
    inner: tokenizers.Tokenizer = tiny.make_tokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single=["<|im_start|>", "$A"], pair=["$A", "$B"], special_tokens=[("<|im_start|>", 1)]
    )
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<|im_start|>"})
    tokenizer = Tokenizer(inner, template=template)
    assert tokenizer.encode("x")[0] == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == tokenizer.encode("x")  # once, not twice


def test_neither_truncated_nor_padded(tiny: ModuleType) -> None:
    inner: tokenizers.Tokenizer = tiny.make_tokenizer()
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    tokenizer = Tokenizer(inner)
    assert len(tokenizer.encode("x" * 100)) == 100
    assert len(tokenizer.encode("x")) == 1


@pytest.mark.parametrize("piece", ["word ", "你好", "1", "a", " ", "\n", "<|im_end|>x"])
def test_long_texts(smollm2: Tokenizer, piece: str) -> None:
    """They go another way through the library; the tokens are the same."""
    text = piece * (3000 // len(piece))
    inner = smollm2._tokenizer
    assert smollm2.encode(text) == inner.encode(text).ids
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


def test_bad_text_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate stands at character 3") as caught:
        smollm2.encode("abc\ud800")
    assert caught.value.field == "input.text"
    with pytest.raises(InvalidRequest) as caught:
        smollm2.encode_chat([{"role": "user", "content": "\udfff"}])
    assert caught.value.field == "input.chat"


@pytest.mark.parametrize("bad", [-1, 49152, 2**31, 2**32, 2**70])
def test_ids_out_of_range_are_refused(smollm2: Tokenizer, bad: int) -> None:
    for use in (lambda: smollm2.decode([5, bad]), lambda: smollm2.token_text(bad), lambda: smollm2.check_ids([5, bad])):
        with pytest.raises(InvalidRequest, match=f"token id {bad} ") as caught:
            use()
        assert caught.value.field == "input.token_ids"


def test_token_texts(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(" the 你<|im_end|>")
    assert smollm2.token_text(ids[0]) == " the"
    assert smollm2.token_text(ids[-1]) == "<|im_end|>"
    assert b"".join(smollm2.token_bytes(token_id) for token_id in ids) == " the 你<|im_end|>".encode()
    assert "\ufffd" in smollm2.token_text(ids[2])
    for token_id in range(0, 49152, 97):
        assert smollm2.token_text(token_id) == smollm2.decode([token_id], skip_special=False)


def test_the_models_vocabulary_may_be_larger(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_llama_dir / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 1024}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.vocab_size == 1024
    assert tokenizer.decode([1023]) == tokenizer.token_text(1023) == ""
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.field == "input.chat"


def test_unusable_files(tmp_path: Path, tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tiny_llama_dir / "tokenizer.json").read_bytes())
    for content, message in (("[]", "no JSON object"), ('{"vocab_size": "many"}', "vocab_size is 'many'")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            Tokenizer.from_dir(tmp_path)


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, twostroke.engine.detokenizer, twostroke.engine.models, twostroke.engine.gguf_convert\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
