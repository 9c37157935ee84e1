"""The comparison with transformers: it passes on good models, and names what is wrong with others."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twostroke.engine.verify import Report, verify
from twostroke.errors import ConfigError

PROMPTS = ("The lighthouse keeper", "今天天气很好", "for i in range(10): print(i)\n" * 5)
FIRST = "model.layers.1."


def load_module(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def original(tiny, tmp_path_factory) -> Path:
    return tiny.make_tiny_llama(tmp_path_factory.mktemp("verify") / "llama", layers=4)


@pytest.fixture
def changed(original, tmp_path):
    """A copy of the original with changed tensors."""

    def make(change) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(original, copy)
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors")
        return copy

    return make


def permuted(name: str):
    def change(tensors) -> None:
        order = torch.randperm(tensors[name].shape[0], generator=torch.Generator().manual_seed(0))
        tensors[name] = tensors[name][order].contiguous()

    return change


def run(model: Path, original: Path, **options) -> Report:
    return verify(model, original, **{"prompts": PROMPTS, "tokens": 12, **options})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_good_model_passes(original, dtype):
    stages = []
    report = run(original, original, dtype=dtype, progress=lambda *stage: stages.append(stage))
    assert report.ok, report
    assert [check.name for check in report.layers] == ["embedding", *(f"layer {i}" for i in range(4)), "logits"]
    assert [check.tokens for check in report.greedy] == [12, 12, 12]
    assert {"English", "Chinese", "emoji", "code", "whitespace", "specials", "chat template"} <= {
        check.name for check in report.texts
    }
    assert all(check.lossless for check in report.texts)
    assert (report.failing, report.weights) == ("", [])
    assert stages[-1] == ("greedy tokens", 3, 3)
    if dtype == "float32":
        assert max(check.relative for check in report.layers) < 1e-5
        assert [check.agreed for check in report.greedy] == [12, 12, 12]
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "layer 0"),
        ("model.layers.1.self_attn.k_proj.weight", "layer 1"),
        ("model.layers.2.self_attn.v_proj.weight", "layer 2"),
        ("model.layers.3.self_attn.o_proj.weight", "layer 3"),
        ("model.layers.1.mlp.gate_proj.weight", "layer 1"),
        ("model.layers.2.mlp.down_proj.weight", "layer 2"),
        ("model.layers.3.input_layernorm.weight", "layer 3"),
        ("model.embed_tokens.weight", "embedding"),
        ("model.norm.weight", "logits"),
        ("lm_head.weight", "logits"),
    ],
)
def test_a_permuted_tensor_is_found(original, changed, name, place):
    report = run(changed(permuted(name)), original)
    assert not report.ok
    assert report.failing == place
    assert [check.name for check in report.weights if not check.ok] == [name]
    (check,) = [check for check in report.weights if check.name == name]
    assert check.reordered
    assert check.original is not None
    assert check.ours.std == pytest.approx(check.original.std)
    before = [check.name for check in report.layers].index(place)
    assert all(check.ok for check in report.layers[:before])


def test_a_permuted_tensor_is_found_in_bfloat16(original, changed):
    report = run(changed(permuted(FIRST + "mlp.up_proj.weight")), original, dtype="bfloat16")
    assert report.failing == "layer 1"


def test_a_scaled_tensor_shows_in_the_statistics(original, changed):
    name = FIRST + "self_attn.o_proj.weight"
    report = run(changed(lambda tensors: tensors[name].mul_(1.5)), original)
    assert report.failing == "layer 1"
    (check,) = [check for check in report.weights if not check.ok]
    assert (check.name, check.reordered) == (name, False)
    assert check.original is not None
    assert check.ours.absmax == pytest.approx(1.5 * check.original.absmax)
    assert check.ours.shape == (64, 64)


def test_nan_is_off(original, changed):
    report = run(changed(lambda tensors: tensors[FIRST + "mlp.up_proj.weight"].fill_(float("nan"))), original)
    assert report.failing == "layer 1"
    assert not any(check.ok for check in report.greedy)


def test_another_tokenizer_is_off(original, changed):
    copy = changed(lambda tensors: None)
    content = json.loads((copy / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (copy / "tokenizer.json").write_text(json.dumps(content))
    report = run(copy, original)
    assert not report.ok
    assert report.failing == ""
    assert "tokens" in next(check.difference for check in report.texts if check.name == "English")


def test_models_of_other_sizes_are_refused(tiny, original, tmp_path):
    with pytest.raises(ConfigError, match="4 layers, not 2"):
        run(tiny.make_tiny_llama(tmp_path / "flat", layers=2), original)
    with pytest.raises(ConfigError, match="differ in size"):
        run(tiny.make_tiny_llama(tmp_path / "narrow", layers=4, hidden=32), original)


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen2-window"])
def test_other_architectures_pass_and_fail(tiny, tmp_path, name):
    models = load_module("tiny_models")
    for folder in ("good", "bad"):
        models.make_model(tmp_path / folder, name)
        models.add_tokenizer(tmp_path / folder, tiny.make_tokenizer())
    report = run(tmp_path / "good", tmp_path / "good")
    assert all(check.ok for check in (*report.layers, *report.greedy))  # Qwen's tokenizer has rules of its own
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    broken = next(key for key in tensors if key.startswith(FIRST) and "down_proj" in key)
    permuted(broken)(tensors)
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    report = run(tmp_path / "bad", tmp_path / "good")
    assert report.failing == "layer 1"
    assert [check.name for check in report.weights if not check.ok] == [broken]


def test_prompts_without_tokens_are_refused(original):
    with pytest.raises(ConfigError, match="prompt without tokens"):
        run(original, original, prompts=["", "a"])
    with pytest.raises(ConfigError, match="no room"):
        run(original, original, tokens=4096)


def test_without_transformers_the_remedy_is_told(original, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"twostroke\[dev\]"):
        run(original, original)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_model(smollm2_dir, tmp_path, dtype):
    report = verify(smollm2_dir, smollm2_dir, dtype=dtype)
    assert report.ok, report
    assert dtype != "float32" or all(check.agreed == check.tokens for check in report.greedy)
    shutil.copytree(smollm2_dir, tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    name = "model.layers.17.mlp.up_proj.weight"
    permuted(name)(tensors)
    save_file(tensors, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    report = verify(tmp_path / "copy", smollm2_dir, dtype=dtype, prompts=PROMPTS[:1], tokens=4)
    assert report.failing == "layer 17"
    assert [check.name for check in report.weights if not check.ok] == [name]
