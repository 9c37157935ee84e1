"""Generated requests, by the API's own description: each has an end that is described, and a neighbour does not notice.

The description is kept current here too.
"""

import asyncio
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
    unsupported_method,
)

from ...http_client import USER, served
from ...stand_in_worker import Script, StandIn

ROOT = Path(__file__).parents[4]
DESCRIPTION = ROOT / "docs" / "openapi.json"
SCHEMA = schemathesis.openapi.from_path(DESCRIPTION)
OPERATIONS = [operation.ok() for operation in SCHEMA.get_all_operations()]
UNASKED = [positive_data_acceptance, unsupported_method]  # ranges are told by refusals
TOO_LARGE = 413
FAULTS = {500, 502, 503, 504}


def test_the_description_is_current(tmp_path: Path) -> None:
    """Else: python scripts/openapi.py docs/openapi.json."""
    current = runpy.run_path(str(ROOT / "scripts" / "openapi.py"))
    fresh = tmp_path / "openapi.json"
    fresh.write_text(current["json"].dumps(current["document"](), indent=1, ensure_ascii=False) + "\n")
    assert fresh.read_text() == DESCRIPTION.read_text()


def fuzz(operation: Any, mode: GenerationMode, base: str, examples: int, stop: threading.Event) -> None:
    """Sends generated requests, until `stop`."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if stop.is_set():
            return
        response = case.call(base_url=base, timeout=30)
        assert response.status_code not in FAULTS, (case.body, response.text)
        refused = [negative_data_rejection] if response.status_code == TOO_LARGE else []  # which that does not know
        case.validate_response(response, excluded_checks=UNASKED + refused)

    check()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "examples", [5, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["few", "many"]
)
async def test_every_generated_request_has_a_described_end(
    tiny_llama_dir: Path, mode: GenerationMode, examples: int
) -> None:
    stop = threading.Event()
    async with served(tiny_llama_dir, StandIn("both", "w0", Script(scores=True))) as it:
        base = f"http://{it.it.gateway.http_address}"
        plain = (await it.post("/v1/chat/completions", {"messages": USER, "seed": 1})).json()["choices"]

        async def neighbour() -> None:
            while not stop.is_set():
                response = await it.post("/v1/chat/completions", {"messages": USER, "seed": 1})
                assert response.json()["choices"] == plain
                await asyncio.sleep(0.2)

        beside = asyncio.create_task(neighbour())
        try:
            for operation in OPERATIONS:
                if mode is GenerationMode.NEGATIVE and operation.method == "get":
                    continue  # nothing can be wrong
                await asyncio.to_thread(fuzz, operation, mode, base, examples, stop)
        finally:
            stop.set()
            await beside
