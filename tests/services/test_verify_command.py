"""`twostroke verify` on tiny models: what it prints, and its exit code."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from twostroke.services.cli import main

from ..tiny import make_tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with `good`, and `bad`: the same but for one tensor, its rows in reverse."""
    folder = tmp_path_factory.mktemp("verify")
    make_tiny_llama(folder / "good", layers=3)
    shutil.copytree(folder / "good", folder / "bad")
    tensors = load_file(folder / "bad" / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "bad" / "model.safetensors")
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, words), "--tokens", "6"], prog_name="twostroke")


def test_a_good_model(models):
    result = run(models / "good")
    assert result.exit_code == 0, result.output
    for word in ("embedding", "layer 2", "logits", "6 of 6", "Chinese", "exactly", "all within tolerance"):
        assert word in result.stdout
    assert "off" not in result.stdout


def test_a_permuted_tensor(models):
    result = run(models / "bad", "--against", models / "good")
    assert result.exit_code == 1
    assert "off: layer 1 first" in result.stdout
    assert "weights of layer 1" in result.stdout
    assert "model.layers.1.self_attn.v_proj.weight: the original's values in another order" in result.stdout


def test_json(models, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one line\n\nanother, 更长的一行\n")
    result = run(models / "bad", "--against", models / "good", "--json", "--dtype", "bfloat16", "--prompts", prompts)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["ok"], report["failing"], report["dtype"]) == (False, "layer 1", "bfloat16")
    assert len(report["greedy"]) == 2
    assert [entry["name"] for entry in report["weights"] if not entry["ok"]] == [
        "model.layers.1.self_attn.v_proj.weight"
    ]


@pytest.mark.parametrize(("content", "named"), [(b"\n\n", "has no line"), (b"\xff\xfe", "cannot be read")])
def test_prompts_that_cannot_be_used(models, tmp_path, content, named):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    result = run(models / "good", "--prompts", prompts)
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_model_that_is_not_there(tmp_path):
    result = run(tmp_path / "nothing")
    assert result.exit_code == 2
    assert "nothing" in result.stderr
