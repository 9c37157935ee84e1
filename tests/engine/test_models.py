"""Names of models: what each means, and what is said when it means nothing."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from twostroke.engine.models import EMBEDDED, cached, read_config, resolve, served_name
from twostroke.errors import ConfigError


def test_a_directory(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tiny_llama_dir)) == tiny_llama_dir
    monkeypatch.setenv("HOME", str(tiny_llama_dir.parent))
    assert resolve(f"~/{tiny_llama_dir.name}") == tiny_llama_dir
    monkeypatch.chdir(tiny_llama_dir)
    assert resolve(".") == Path()
    assert served_name(".") == served_name(str(tiny_llama_dir)) == tiny_llama_dir.name


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks config\.json, tokenizer\.json, \*\.safetensors.*twostroke convert"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "llama",
        "/no/such/dir",
        "./x/y",
        "../x",
        "a/b/c",
        "a b/c",
        "org/name@",
        "org/",
        "x@y",
        "x" * 5000,
        "a\0b",
        "~nobody/x",
    ],
)
def test_names_that_mean_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is neither a directory, nor smollm2-135m, nor a hub id") as caught:
        resolve(name)
    assert caught.value.field == "model"


def test_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="twostroke convert"):
        resolve(str(tmp_path / "a.gguf"))


def test_the_embedded_model(smollm2_dir: Path) -> None:
    assert resolve(EMBEDDED) == smollm2_dir
    assert {path.name for path in smollm2_dir.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "twostroke.json",
    }


def test_served_names() -> None:
    assert served_name(EMBEDDED) == EMBEDDED
    assert served_name("org/name@v1.0") == served_name("org/name") == "org/name"


def test_cached(smollm2_dir: Path, tmp_path: Path) -> None:
    assert cached(tmp_path) == []
    (tmp_path / EMBEDDED).symlink_to(smollm2_dir)
    (found,) = cached(tmp_path)
    assert (found.name, found.path) == (EMBEDDED, tmp_path / EMBEDDED)
    assert 269_000_000 < found.nbytes < 280_000_000


def test_the_caches_place(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("variable", "argument"):
        (tmp_path / name).mkdir()
        (tmp_path / name / EMBEDDED).symlink_to(smollm2_dir)
    monkeypatch.setenv("TWOSTROKE_MODELS_DIR", str(tmp_path / "variable"))
    assert resolve(EMBEDDED) == tmp_path / "variable" / EMBEDDED
    assert resolve(EMBEDDED, cache_dir=tmp_path / "argument") == tmp_path / "argument" / EMBEDDED


def test_a_configuration_needs_neither_weights_nor_tokenizer(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.make_tiny_llama(tmp_path / "m")
    whole = read_config(str(path))
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert read_config(str(path)).layers == whole.layers == 2
    other = (path / "config.json").rename(tmp_path / "other.json")
    assert read_config(str(other)) == replace(whole, eos_token_ids=frozenset({2}))
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        read_config(str(path))
    with pytest.raises(ConfigError, match="neither a directory"):
        read_config(str(tmp_path / "no.json"))
