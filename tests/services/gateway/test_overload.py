"""Overload through both doors: who is refused, with what status, and when to come back."""

import re
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from twostroke.services.security.api_keys import new_key
from twostroke.services.security.limits import Limits
from twostroke.v1 import inference_pb2 as pb

from ..cluster import cluster, detail, field_of, refusal, retry_s, text_request, token_ids, until
from ..http_client import served
from ..stand_in_worker import Script, StandIn

Code = grpc.StatusCode
PATH = "/v1/completions"


def pair(**script: Any) -> tuple[StandIn, StandIn]:
    return StandIn("prefill", "p0", Script(**script)), StandIn("decode", "d0", Script(**script))


def tokens_request(prompt: int, max_tokens: int, *, first: int = 3, **fields: Any) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[first + i % 90 for i in range(prompt)])
    return pb.GenerateRequest(
        input=pb.Input(token_ids=ids), stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True), **fields
    )


def key_for(path: Path, tenant: str, **limits: int) -> str:
    key, kept = new_key(tenant, limits=Limits(**limits))
    with path.open("a") as file:
        file.write(kept.line() + "\n")
    return key


async def test_more_tokens_than_the_queue_takes(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir, *pair(mute_after=0), max_queue_tokens=600) as it:
        gateway = it.it.gateway
        held = it.it.stub.Generate(tokens_request(400, 100))
        await until(lambda: gateway.admission.queue.tokens == 500)
        error = await refusal(it.it.collect(tokens_request(90, 20)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "500 tokens are to be computed" in (error.details() or "")
        assert 1 <= retry_s(error) <= 1.25  # nothing was measured yet
        assert detail(error, error_details_pb2.ErrorInfo).reason == "OVERLOADED"
        response = await it.post(PATH, {"prompt": [3] * 90, "max_tokens": 20})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert response.headers["retry-after"] in ("1", "2")
        small = it.it.stub.Generate(tokens_request(90, 10, first=50))
        await until(lambda: gateway.admission.queue.tokens == 600)
        metrics = (await it.http.get("/metrics")).text
        assert 'twostroke_refusals_total{reason="queue_tokens",tenant=""} 2.0' in metrics
        assert "twostroke_queue_tokens 600.0" in metrics
        assert "twostroke_queue_tokens_limit 600.0" in metrics
        small.cancel()
        await until(lambda: gateway.admission.queue.tokens == 500)
        cached = it.it.stub.Generate(tokens_request(90, 10))  # 80 of its tokens are being computed with the others
        await until(lambda: gateway.admission.queue.tokens == 520)
        for call in (held, cached):
            call.cancel()
        await it.it.idle()
        assert (gateway.admission.queue.tokens, gateway.admission.queue.places) == (0, 0)


async def test_the_queue_follows_the_fleet_and_the_tokens_that_come(tiny_llama_dir: Path) -> None:
    p, d = pair(pause_s=0.001, tokens=[9] * 300)
    async with cluster(tiny_llama_dir, p, d) as it:
        admission = it.gateway.admission
        assert admission.max_tokens == 4 * 1000 * 16
        call = it.stub.Generate(tokens_request(40, 100))
        await call.read()
        assert admission.queue.tokens < 100  # the prompt is done
        while (piece := await call.read()) and not piece.HasField("finish"):
            pass
        await it.idle()
        assert admission.queue.tokens == 0


async def test_urgent_requests_take_the_places_of_those_that_wait(tiny_llama_dir: Path) -> None:
    p, d = pair(mute_after=0)
    async with cluster(tiny_llama_dir, p, d, max_queue=2) as it:
        calls = [it.stub.Generate(tokens_request(5, 5, priority=priority)) for priority in (1, 7)]
        await until(lambda: len(d.submits) == 2)
        assert {submit.priority for submit in (*p.submits, *d.submits)} == {1, 7}
        error = await refusal(it.collect(tokens_request(5, 5, priority=7)))
        assert "2 requests are being served already" in (error.details() or "")
        p.script.mute_after = d.script.mute_after = 1000
        assert len(token_ids(await it.collect(tokens_request(5, 5)))) == 5
        displaced = await refusal(calls[1].read())
        assert displaced.code() is Code.RESOURCE_EXHAUSTED
        assert "more urgent" in (displaced.details() or "")
        assert retry_s(displaced) > 0
        await until(lambda: d.cancels)
        assert not calls[0].done()
        calls[0].cancel()
        await it.idle()


async def test_a_tenant_s_minute(tiny_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    acme = key_for(path, "acme", input_tokens_per_minute=600, output_tokens_per_minute=600, priority=-5)
    quick = key_for(path, "quick", requests_per_minute=2)
    async with served(tiny_llama_dir, *pair(tokens=[9] * 99), api_keys=path) as it:
        metadata = (("authorization", f"Bearer {acme}"),)
        await it.it.collect(tokens_request(500, 5), metadata=metadata)
        error = await refusal(it.it.collect(tokens_request(200, 5), metadata=metadata))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "'acme' has used up the 600 input tokens a minute" in (error.details() or "")
        assert 9 < retry_s(error) <= 10  # 100 tokens, at 10 a second
        headers = {"authorization": f"Bearer {acme}"}
        response = await it.http.post(PATH, json={"prompt": [3] * 200, "max_tokens": 5}, headers=headers)
        assert (response.status_code, response.headers["retry-after"]) == (429, "10")
        await it.it.collect(tokens_request(80, 5), metadata=metadata)  # what is refused is not charged
        denied = await refusal(it.it.collect(tokens_request(5, 5, priority=-6), metadata=metadata))
        assert (denied.code(), field_of(denied)) == (Code.PERMISSION_DENIED, "priority")
        assert (await it.http.post(PATH, json={"prompt": "x", "priority": -6}, headers=headers)).status_code == 403
        await it.it.collect(tokens_request(5, 5, priority=-5), metadata=metadata)
        headers = {"authorization": f"Bearer {quick}"}
        told = [(await it.http.post(PATH, json={"prompt": "x", "priority": 1}, headers=headers)) for _ in range(3)]
        assert [response.status_code for response in told] == [200, 200, 429]
        assert told[2].headers["retry-after"] == "30"
        assert (await it.http.post("/tokenize", json={"prompt": "x"}, headers=headers)).status_code == 200
        await it.it.idle()


async def test_a_deadline_within_the_queue_is_refused_at_the_door(tiny_llama_dir: Path) -> None:
    p, d = pair(mute_after=0)
    p.waiting_tokens = 100_000
    async with cluster(tiny_llama_dir, p, d, disaggregate="always") as it:
        load = next(load for load in it.gateway.fleet.loads() if load.name == "p0")
        await until(lambda: load.waiting_tokens)
        hasty = it.stub.Generate(tokens_request(40, 5), timeout=3)  # nothing is measured: nothing is refused
        await until(lambda: len(p.submits) == 1)
        held = it.stub.Generate(tokens_request(40, 5))
        await until(lambda: len(p.submits) == 2)
        hasty.cancel()
        await until(lambda: it.gateway.admission.inside == 1)
        p.submits.pop()
        load.prompt_rate.add(20_000, 2.0, time.monotonic())
        error = await refusal(it.collect(tokens_request(40, 5), timeout=5))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert re.search(r"about 10\.0 s more, and the deadline is in [45]\.\d s", error.details() or "")
        assert 4 < retry_s(error) < 6
        for timeout, waiting in ((9, 100_000), (None, 100_000), (4, 0)):
            p.waiting_tokens = waiting
            await until(lambda waiting=waiting: bool(load.waiting_tokens) == bool(waiting))
            call = it.stub.Generate(tokens_request(40, 5), timeout=timeout)
            await until(lambda: len(p.submits) == 2)
            call.cancel()
            await until(lambda: it.gateway.admission.inside == 1)
            p.submits.pop()
        held.cancel()
        await it.idle()


async def test_wrong_keys_are_refused_after_a_while_at_both_doors(tiny_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    known, late = key_for(path, "acme"), key_for(path, "late")
    async with served(tiny_llama_dir, *pair(), api_keys=path, wrong_keys_per_minute=6) as it:

        async def grpc_code(key: str) -> Code:
            call = it.it.stub.Tokenize(
                pb.TokenizeRequest(input=pb.Input(text="x")), metadata=(("authorization", f"Bearer {key}"),)
            )
            return await call.code()

        async def status(key: str) -> int:
            return (await it.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

        assert (await grpc_code(known), await status(known)) == (Code.OK, 200)
        for _ in range(3):
            assert (await grpc_code("wrong"), await status("wrong")) == (Code.UNAUTHENTICATED, 401)
        for key in ("wrong", late):
            assert (await grpc_code(key), await status(key)) == (Code.RESOURCE_EXHAUSTED, 429)
        error = await refusal(it.it.collect(text_request(), metadata=(("authorization", "Bearer x"),)))
        assert 0 < retry_s(error) <= 10
        figures = it.it.gateway.figures.text()
        assert b"twostroke_wrong_keys_total 9.0" in figures
        assert b"twostroke_wrong_keys_refused_total 5.0" in figures
        assert (await grpc_code(known), await status(known)) == (Code.OK, 200)


@pytest.mark.parametrize("field", ["priority"])
async def test_a_priority_out_of_range_is_refused(tiny_llama_dir: Path, field: str) -> None:
    async with served(tiny_llama_dir, *pair()) as it:
        status, error = await it.refused(PATH, {"prompt": "x", field: 1 << 31})
        assert (status, error["param"]) == (400, field)
        await it.it.collect(text_request(priority=(1 << 31) - 1))
