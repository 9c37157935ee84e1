"""The schema: types, bounds, sizes, addresses, and that nothing is read behind one's back."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from twostroke.engine.config import EngineOptions
from twostroke.services.describe import SECTIONS, kind_of
from twostroke.services.settings import (
    GatewaySettings,
    Settings,
    UpSettings,
    WorkerSettings,
    parse_bytes,
    parse_list,
    split_address,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1GiB", 1 << 30),
        ("1gib", 1 << 30),
        (" 512 MB ", 512_000_000),
        ("1.5KiB", 1536),
        ("0.5TB", 500_000_000_000),
        ("4096", 4096),
        ("7B", 7),
        ("9007199254740993", 9007199254740993),  # not by way of a float
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1G", "1 gigabyte", "-1MiB", "1e9", "1MiBB", "٣MiB", "1,5MiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@given(st.integers(0, 1 << 60), st.sampled_from(["", "B", "KiB", "MiB", "kb"]))
def test_sizes_of_whole_numbers_are_exact(count: int, unit: str) -> None:
    scale = {"": 1, "B": 1, "KiB": 1024, "MiB": 1 << 20, "kb": 1000}[unit]
    assert parse_bytes(f"{count}{unit}") == count * scale


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("[::1]", 80)),
        (":7", ("[::]", 7)),
        ("worker-1.internal:65535", ("worker-1.internal", 65535)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "host:-1", "host:65536", "::1:80", "a b:1", "http://a:1"]
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        split_address(text)


def test_lists() -> None:
    assert parse_list("a:1, b:2,,") == ["a:1", "b:2"]
    assert parse_list(("a:1", "b:2,c:3")) == ["a:1", "b:2", "c:3"]
    assert parse_list("") == []
    assert parse_list(7) == 7


def test_strings_from_flags_and_variables_become_values() -> None:
    worker = WorkerSettings.model_validate(
        {"role": "prefill", "page_size": "64", "kv_memory": "2GiB", "prefix_cache": "false", "watermark": "0.25"}
    )
    assert (worker.page_size, worker.kv_memory, worker.prefix_cache, worker.watermark) == (64, 2 << 30, False, 0.25)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 17),
        ("page_size", "16.0"),
        ("kv_memory", "1B"),
        ("kv_memory", "100TiB"),
        ("max_batch", 0),
        ("max_batch", "many"),
        ("token_budget", 15),
        ("watermark", "nan"),
        ("watermark", 0.51),
        ("unticketed_share", 0),
        ("drain_s", "inf"),
        ("drain_s", -1),
        ("reserve", "some"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("gpu_memory", 0),
        ("gpu_memory", "0.0"),
        ("gpu_memory", -0.5),
        ("gpu_memory", 90),
        ("gpu_memory", "90%"),
        ("gpu_memory", "1.5"),
        ("gpu_memory", "512KiB"),
        ("gpu_memory", "nan"),
        ("gpu_memory", "inf"),
        ("gpu_memory", "100TiB"),
        ("gpu_memory", True),
        ("load_format", "random"),
        ("listen", ""),
        ("listen", "nowhere"),
        ("advertise", "nowhere"),
        ("name", "two words"),
        ("name", "²"),
        ("name", "x" * 65),
        ("model", ""),
        ("threads", 1025),
        ("role", "gateway"),
        ("unknown", 1),
    ],
)
def test_wrong_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        WorkerSettings.model_validate({"role": "both", field: value})
    assert [problem["loc"][0] for problem in caught.value.errors()] == [field]


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ("0.9", 0.9),
        (1, 1.0),
        ("1", 1.0),
        (0.25, 0.25),
        ("60GiB", 60 << 30),
        ("64424509440", 60 << 30),
        (1 << 20, 1 << 20),
    ],
)
def test_a_limit_is_a_share_or_a_size(given: object, limit: float) -> None:
    settings = WorkerSettings.model_validate({"role": "both", "gpu_memory": given})
    assert settings.gpu_memory == limit
    assert settings.engine_options().gpu_memory == limit


def test_what_is_not_said_is_the_devices() -> None:
    def sizes(**given: object) -> tuple[int, int, int, int]:
        options = WorkerSettings.model_validate({"role": "both", **given}).engine_options()
        return options.page_size, options.token_budget, options.max_batch, options.kv_memory

    assert sizes() == sizes(device="cpu") == (16, 512, 64, 1 << 30)
    assert sizes(device="cuda") == sizes(device="cuda:3") == (64, 8448, 256, 0)
    said = {"page_size": "16", "token_budget": "1024", "max_batch": "7", "kv_memory": "3MiB"}
    assert sizes(device="cuda", **said) == sizes(**said) == (16, 1024, 7, 3 << 20)


def test_options_are_whole_however_they_are_made() -> None:
    options = EngineOptions(device="cuda:1", page_size=128)
    assert (options.page_size, options.max_batch, options.device_type) == (128, 256, "cuda")
    assert dataclasses.replace(options, max_batch=5).token_budget == 8448
    assert EngineOptions(token_budget=32).max_batch == 31  # whoever sizes buffers by one can rely on the other
    assert EngineOptions(device="else").page_size == 16  # it will be refused by name, not by its page size


def test_too_many_workers() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings.model_validate({"workers": [f"h:{port}" for port in range(1025)]})


def test_arguments_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_LISTEN", "1.2.3.4:5")
    assert GatewaySettings().listen == "127.0.0.1:50051"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings().listen = "a:1"


def test_the_engine_gets_all_its_options() -> None:
    changed = {"kv_memory": 1 << 21, "max_batch": 3, "reserve": "max", "threads": 2, "prefix_cache": False}
    options = WorkerSettings.model_validate({"role": "decode", **changed}).engine_options()
    assert options == dataclasses.replace(EngineOptions(), **changed)  # type: ignore[arg-type]
    assert WorkerSettings(role="both").engine_options() == EngineOptions()  # the same defaults in both places


@pytest.mark.parametrize("schema", [Settings, *SECTIONS.values()])
def test_every_field_says_what_it_is(schema: type[Settings]) -> None:
    for name, field in schema.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


@pytest.mark.parametrize("schema", [GatewaySettings, WorkerSettings, UpSettings])
def test_every_number_has_bounds(schema: type[Settings]) -> None:
    for name, field in schema.model_fields.items():
        if kind_of(field) in (int, float):
            kinds = {type(mark).__name__ for mark in field.metadata}
            assert kinds & {"Ge", "Gt"}, name
            assert "Le" in kinds, name
