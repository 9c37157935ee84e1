"""`twostroke plan`: the memory plan before there is a worker, a GPU, or even weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twostroke.services.cli import main
from twostroke.services.commands.plan import compare_pages

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TWOSTROKE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words], prog_name="twostroke")


def test_a_bare_configuration_for_a_gpu_that_is_not_here(config: Path) -> None:
    told = json.loads(run(str(config), "--device-memory", "141GiB", "--gpu-memory", "0.8", "--json").output)
    assert told["model"] == str(config)
    assert (told["device"], told["limit"]) == ("cuda", int(0.8 * 141 * GIB))
    assert told["bytes"]["total"] <= told["limit"]
    assert told["kv"]["token_bytes"] == 131072
    assert told["kv"]["page_size"] == 64
    assert told["sequences"]["1024"] == told["kv"]["pages"] // 16


def test_the_workers_settings_hold(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "twostroke.toml"
    file.write_text(f"model = '{config}'\n[worker]\ngpu_memory = '40GiB'\npage_size = 16")
    monkeypatch.setenv("TWOSTROKE_PAGE_SIZE", "32")
    told = json.loads(run("--config", str(file), "--device", "cuda:1", "--device-memory", "80GB", "--json").output)
    assert (told["device"], told["limit"], told["kv"]["page_size"]) == ("cuda:1", 40 * GIB, 32)


def test_a_table(config: Path) -> None:
    result = run(str(config.parent), "--device-memory", "141GiB", "--input", "8192", "--output", "1")
    assert result.exit_code == 0
    for words in ("weights", "KV pool, bfloat16", "limit, of 141.00 GiB", "8,192 tokens in, 1 out", "128 would suit"):
        assert words in result.output


def test_a_cpu_is_the_default(config: Path) -> None:
    told = json.loads(run(str(config), "--json").output)
    assert (told["device"], told["limit"], told["kv"]["page_size"]) == ("cpu", 0, 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memory", "lots"], "device_memory: got 'lots', takes a size such as 141GiB"),
        (["--device-memory", "0"], "device_memory: got '0', takes a size"),
        (["--device-memory", "24GiB"], "gpu_memory: the limit is 21.60 GiB of 24.00"),
        (["--device-memory", "24GiB", "--gpu-memory", "90"], "gpu_memory: got '90', takes a share over 0, up to 1"),
        (["--page-size", "20"], "page_size: got '20', takes one of 16, 32, 64, 128"),
        (["--device", "cuda:99"], "--device-memory 141GiB"),
    ],
)
def test_refusals(words: list[str], message: str, config: Path) -> None:
    result = run(str(config), *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_model_that_is_none(tmp_path: Path) -> None:
    assert run(str(tmp_path)).exit_code == 2
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in run(str(tmp_path)).stderr


def test_page_sizes_are_compared() -> None:
    short, long = compare_pages(64, 64), compare_pages(8192, 1024)
    assert list(short["lost"]) == ["16", "32", "64", "128"]
    assert sorted(short["lost"].values()) == list(short["lost"].values())
    assert short["suited"] == 16
    assert long["suited"] == 128


def test_no_torch_is_imported(config: Path) -> None:
    code = (
        "import sys; from twostroke.services.cli import main\n"
        f"main(['plan', {str(config)!r}, '--device-memory', '141GiB'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_the_operations_page_shows_it(config: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    assert run(str(config), "--device-memory", "141GiB").output in page
