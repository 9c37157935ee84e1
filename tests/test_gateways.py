"""compose/gateways/: what can be said of it without the programs; tests/gateways/ runs them."""

import importlib.util
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.api import annotations_pb2
from google.protobuf import descriptor_pb2

from twostroke.v1 import inference_pb2

from .gateways.kinds import CONFIGURATIONS, KINDS, Kind, replaced

ROOT = Path(__file__).parent.parent
README = (CONFIGURATIONS / "README.md").read_text(encoding="utf-8")


class Loader(yaml.SafeLoader):
    """Knows compose's tag for what an override takes away."""


Loader.add_constructor("!reset", lambda loader, node: loader.construct_sequence(node))


def override(kind: Kind) -> dict[str, Any]:
    text = (CONFIGURATIONS / kind.name / "compose.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(re.sub(r"\$\{[A-Z_]+:\?[^}]*\}", "/somewhere", text), Loader)
    return loaded


def test_every_folder_has_its_program() -> None:
    assert {path.name for path in CONFIGURATIONS.iterdir() if path.is_dir()} == {kind.name for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_tests_replace_is_there_and_is_all_that_names_places(kind: Kind) -> None:
    text = replaced(
        replaced((CONFIGURATIONS / kind.name / kind.file).read_text(encoding="utf-8"), kind.places), kind.silence
    )
    settings = "\n".join(line.partition("#")[0] for line in text.splitlines())
    assert not re.search(r"/certs|\bgateway:\d|address: gateway\b|\b(?:50051|8000|8443)\b", settings)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_compose_file(kind: Kind) -> None:
    pytest.importorskip("check_jsonschema")
    from jsonschema import Draft7Validator

    loaded = override(kind)
    schemas = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    errors = list(Draft7Validator(json.loads((schemas / "compose-spec.json").read_text())).iter_errors(loaded))
    assert not errors, errors[0].message
    services = loaded["services"]
    assert services["gateway"] == {"ports": []}
    proxy = services["proxy"]
    reachable = [port for port in proxy["ports"] if not port.startswith("127.0.0.1:")]
    assert reachable == ["8443:8443"]
    assert int(proxy["user"].partition(":")[0]) > 0
    assert (proxy["read_only"], proxy["cap_drop"]) == (True, ["ALL"])
    mounted = [volume.split(":")[0] for volume in proxy["volumes"]]
    assert mounted.pop() == "/somewhere"
    assert all((ROOT / "compose" / path).is_file() for path in mounted)
    assert f"./gateways/{kind.name}/{kind.file}" in mounted


def merged(base: Any, over: Any) -> Any:
    """As compose does it with two files: mappings by key, other values replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}
    return over


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stack_and_override_together(kind: Kind) -> None:
    """What the proxy waits for and connects to is there; nobody reaches the gateway past it."""
    text = (ROOT / "compose" / "compose.yaml").read_text(encoding="utf-8")
    stack = yaml.safe_load(re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text))
    services = merged(stack, override(kind))["services"]
    assert {*stack["services"], "proxy"} == services.keys()
    waits = {name: entry["condition"] for name, entry in services["proxy"]["depends_on"].items()}
    assert waits == {"gateway": "service_healthy"}
    assert "HEALTHCHECK" in (ROOT / "compose" / "Dockerfile").read_text(encoding="utf-8")
    assert "healthcheck" not in services["gateway"]  # the image's own stands
    assert [name for name, service in services.items() if service.get("ports")] == ["proxy"]
    listens = {word.rpartition(":")[2] for word in services["gateway"]["command"] if word.startswith("0.0.0.0:")}
    settings = (CONFIGURATIONS / kind.name / kind.file).read_text(encoding="utf-8")
    asked = re.findall(r"\bgateway:(\d+)|address: gateway, port_value: (\d+)", settings)
    assert {port or other for port, other in asked} == listens == {"50051", "8000"}
    for port in services["proxy"]["ports"]:
        assert re.search(rf"\b{port.rpartition(':')[2]}\b", re.sub(r"gateway:\d+", "", settings)), port


def test_descriptors_are_those_of_the_api() -> None:
    spec = importlib.util.spec_from_file_location("descriptors", ROOT / "scripts" / "descriptors.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = descriptor_pb2.FileDescriptorSet.FromString(script.PLACE.read_bytes())
    made = descriptor_pb2.FileDescriptorSet.FromString(script.descriptors())
    name = inference_pb2.DESCRIPTOR.name
    ours, theirs = ([file for file in each.file if file.name == name] for each in (kept, made))
    assert ours == theirs, "compose/gateways/envoy/descriptors.pb is stale: make protos"
    assert [file.name for file in kept.file] == [file.name for file in made.file]
    (service,) = ours[0].service
    for method in service.method:
        rule = method.options.Extensions[annotations_pb2.http]
        assert f"`{'POST' if rule.post else 'GET'} {rule.post or rule.get}`" in README


def test_links_and_flags_of_the_page() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (CONFIGURATIONS / target).is_file(), target
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"`(--[a-z][a-z-]+)", README)) - {"--restart-epoch", "--parent-shutdown-time-s"}  # Envoy's
    assert flags
    assert all(f"`{flag}`" in configuration for flag in flags)
