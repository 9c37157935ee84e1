"""`/tokenize`, `/detokenize`, `/v1/models`, `/metrics`."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ...cluster import until
from ...http_client import USER, served
from ...stand_in_worker import Script, StandIn


async def test_there_and_back(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir) as it:  # needs no workers
        text = "a é 😀 <|im_end|>"
        told = (await it.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
        tokenizer = it.it.gateway.lifecycle.model.tokenizer
        assert told["tokens"] == tokenizer.encode(text)
        assert told["token_strs"] == [tokenizer.token_text(token) for token in told["tokens"]]
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 2048)
        assert (await it.post("/detokenize", {"tokens": told["tokens"]})).json() == {"prompt": text}
        chat = (await it.post("/tokenize", {"messages": USER, "model": "llama"})).json()
        assert (chat["tokens"], chat["token_strs"]) == (tokenizer.encode_chat(USER), None)
        long = "word " * 1000  # on a thread
        assert (await it.post("/tokenize", {"prompt": long})).json()["tokens"] == tokenizer.encode(long)


async def test_what_a_template_is_told(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir) as it:
        tokenizer = it.it.gateway.lifecycle.model.tokenizer

        async def text(**body: Any) -> str:
            return tokenizer.decode((await it.post("/tokenize", body)).json()["tokens"], skip_special=False)

        assert await text(messages=USER, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
        assert await text(messages=USER, continue_final_message=True) == "<|im_start|>user\nhello"
        assert await text(prompt="hello", add_special_tokens=False) == "hello"
        assert (await it.refused("/tokenize", {"messages": USER, "tools": [1]}))[1]["param"] == "tools[0]"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "prompt[0]"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 5000}, "prompt"),
    ],
)
async def test_what_is_wrong(tiny_llama_dir: Path, path: str, body: dict[str, Any], param: str) -> None:
    async with served(tiny_llama_dir) as it:
        _, error = await it.refused(path, body)
        assert error["param"] == (param.replace("prompt", "tokens") if path == "/detokenize" else param)


async def test_models(tiny_llama_dir: Path) -> None:
    async with served(tiny_llama_dir) as it:
        told = (await it.http.get("/v1/models")).json()
        (model,) = told["data"]
        assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
            "llama", "model", "twostroke", 2048,
        )  # fmt: skip
        assert (await it.http.get("/v1/models/llama")).json() == model
        assert (await it.sdk.models.retrieve("llama")).id == "llama"
        head = await it.http.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")


async def test_metrics(tiny_llama_dir: Path) -> None:
    workers = StandIn("prefill", "p0"), StandIn("decode", "d0", Script(tokens=list(range(10, 20))))
    async with served(tiny_llama_dir, *workers) as it:
        body = {"messages": USER, "n": 2, "max_tokens": 5}
        await it.post("/v1/chat/completions", body)
        await it.post("/v1/chat/completions", {**body, "top_p": 7})
        await it.http.get("/nothing/here")
        await until(lambda: it.it.gateway.admission.inside == 0)
        response = await it.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }
        assert samples["twostroke_http_responses_total", "/v1/chat/completions", "200"] == 1
        assert samples["twostroke_http_responses_total", "/v1/chat/completions", "400"] == 1
        assert samples["twostroke_http_responses_total", "404", "other"] == 1
        assert samples["twostroke_answers_total", "length"] == 2
        assert samples["twostroke_output_tokens_total",] == 10
        prompt = len(it.it.gateway.lifecycle.model.tokenizer.encode_chat(USER))
        assert samples["twostroke_prompt_tokens_total",] == prompt
        assert samples["twostroke_time_to_first_token_seconds_count",] == 2
        assert samples["twostroke_answers_inside",] == 0
        assert samples["twostroke_worker_pages", "d0", "decode"] == 1000
        assert "hello" not in response.text
        assert json.dumps(body) not in response.text
