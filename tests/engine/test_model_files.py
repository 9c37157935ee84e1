"""Model directories: what is missing is named, and the fingerprint follows the model, not its packaging."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from twostroke.engine.model_files import check_layout, fingerprint, weight_files
from twostroke.engine.safetensors_file import TensorSpec, read_header, write_safetensors
from twostroke.errors import ConfigError


@pytest.fixture
def model(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))


def change_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value != "absent"}
    (model / "config.json").write_text(json.dumps(kept))


def shard(model: Path) -> None:
    """Two files and an index in place of one file."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    assert check_layout(model) == model
    (model / name).unlink()
    with pytest.raises(ConfigError, match=name.replace("model.safetensors", r"\*\.safetensors")) as caught:
        check_layout(model)
    assert caught.value.field == "model"


def test_parts_that_are_not_needed_may_be_missing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert check_layout(model, ("config", "tokenizer")) == model
    (model / "tokenizer.json").unlink()
    assert check_layout(model, ("config",)) == model
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json: a gateway needs one"):
        check_layout(model, ("config", "tokenizer"))
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        check_layout(model, ("tokenizer",))


def test_shards(model: Path) -> None:
    shard(model)
    (model / "consolidated.safetensors").write_bytes(b"other")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert [file.name for file in weight_files(model)] == names
    (model / names[1]).unlink()
    with pytest.raises(ConfigError, match=names[1]):
        check_layout(model)
    for index in ({"weight_map": {"x": "../other/model.safetensors"}}, {"weight_map": {}}, {}, []):
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError, match=r"index\.json"):
            weight_files(model)


def test_fingerprint_does_not_follow_the_packaging(model: Path) -> None:
    before = fingerprint(model)
    assert before == fingerprint(model)
    assert len(bytes.fromhex(before)) == 32
    shard(model)
    assert fingerprint(model) == before
    change_config(model, transformers_version="9", dtype="absent", torch_dtype="float32", _name_or_path="x", x=None)
    assert fingerprint(model) == before
    change_config(model, rope_parameters="absent")
    assert fingerprint(model) == before
    change_config(model, rope_parameters={"rope_theta": 10000, "rope_type": "default"}, rope_theta="absent")
    assert fingerprint(model) == before


def test_fingerprint_follows_the_model(model: Path, tiny: ModuleType, tmp_path: Path) -> None:
    seen = {fingerprint(model), fingerprint(tiny.make_tiny_llama(tmp_path / "other", seed=1))}
    changes: list[dict[str, object]] = [
        {"rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        {"eos_token_id": 5},
    ]
    for change in changes:
        change_config(model, **change)
        seen.add(fingerprint(model))
    tensors = load_file(model / "model.safetensors")
    for changed in (
        tensors | {"model.norm.weight": tensors["model.norm.weight"].bfloat16()},
        tensors | {"model.norm.weight": tensors["model.norm.weight"].reshape(1, -1)},
        {("x" if name == "model.norm.weight" else name): tensor for name, tensor in tensors.items()},
        tensors | {"model.norm.weight": torch.nextafter(tensors["model.norm.weight"], torch.tensor(9.0))},
    ):
        save_file(changed, model / "model.safetensors")
        seen.add(fingerprint(model))
    assert len(seen) == 2 + len(changes) + 4


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"rope_parameters": None, "rope_scaling": {"type": "default"}}, True),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, False),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, False),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, False),
    ],
)
def test_fingerprint_follows_the_rotation_in_every_spelling(model: Path, change: dict[str, object], same: bool) -> None:
    before = fingerprint(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    assert (fingerprint(model) == before) is same


def test_fingerprint_of_the_embedded_model(smollm2_dir: Path) -> None:
    """Pinned: another value on some machine, or after a change of the conversion, would refuse every peer."""
    assert fingerprint(smollm2_dir) == "a2323ca3fb9e20355536f62b79cec1b218c34b18fc1f15212ea328c521d3fce4"


def test_large_tensors_are_sampled_at_their_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = torch.zeros(1 << 20, dtype=torch.uint8)
    seen = set()
    for at in (None, 0, 65535, 1 << 19, (1 << 20) - 1):
        changed = values.clone()
        if at is not None:
            changed[at] = 1
        save_file({"a": changed}, tmp_path / "model.safetensors")
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 5


def test_written_files_are_read_by_the_library(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (2, 3)), TensorSpec("empty", "F32", (0,)), TensorSpec("b.c", "BF16", (5,))]
    tensors = {"a": torch.randn(2, 3), "empty": torch.zeros(0), "b.c": torch.randn(5).bfloat16()}
    content = b"".join(tensors[spec.name].flatten().view(torch.uint8).numpy().tobytes() for spec in specs)
    write_safetensors(tmp_path / "x.safetensors", specs, [content[:7], memoryview(content)[7:]])
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    header = read_header(tmp_path / "x.safetensors")
    assert {name: (stored.dtype, stored.shape) for name, stored in header.items()} == {
        spec.name: (spec.dtype, spec.shape) for spec in specs
    }
    start = header["b.c"].start
    assert (tmp_path / "x.safetensors").read_bytes()[start : start + 10] == content[24:]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 bytes written where the header tells of 8"):
        write_safetensors(tmp_path / "x.safetensors", [TensorSpec("a", "F32", (2,))], [b"12345"])
    assert list(tmp_path.iterdir()) == []


@given(cut=st.integers(0, 60_000), at=st.integers(0, 3000), value=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_damaged_headers_are_refused_or_consistent(
    tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, value: int
) -> None:
    content = bytearray((tiny_llama_dir / "model.safetensors").read_bytes())
    content[at] = value
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    path.write_bytes(content[: len(content) - cut])
    try:
        header = read_header(path)
    except ConfigError:
        return
    assert all(stored.start + stored.nbytes <= len(content) - cut for stored in header.values())
