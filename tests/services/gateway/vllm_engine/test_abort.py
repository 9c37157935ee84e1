"""Abort: at every phase, twice, of many, racing with the end; names in use; tenants apart."""

import asyncio
import random
from pathlib import Path

import grpc
import grpc.aio
import pytest

from twostroke.engine.tokenizer import Tokenizer
from twostroke.services.grpc_setup import open_channel
from twostroke.services.security.api_keys import new_key
from twostroke.smg import vllm_engine_pb2 as pb
from twostroke.smg import vllm_engine_pb2_grpc

from ...cluster import field_of, refusal, until
from .engine_client import Engine, decode, ends, engine, prefill, request, tokens

Code = grpc.StatusCode


async def aborted(it: Engine, call: asyncio.Task[list[pb.GenerateResponse]], *names: str) -> list[pb.GenerateResponse]:
    """Aborts these; what the call's stream said, which ended well. All is free before it is read to its end."""
    await it.abort(*names)
    await it.it.idle()
    async with asyncio.timeout(5):
        return await call


async def full(it: Engine) -> None:
    """Returns when the only request waits for its client to read."""
    [guard] = it.it.gateway.lifecycle._guards
    now = asyncio.get_running_loop().time
    await until(lambda: guard._writing_since is not None and now() - guard._writing_since > 0.1)


@pytest.mark.parametrize("stream", [True, False])
async def test_before_any_token(tiny_llama_dir: Path, *, stream: bool) -> None:
    """It waits at both workers; they are told."""
    async with engine(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0)) as it:
        call = asyncio.create_task(it.all(request("a", stream=stream, n=2)))
        await until(lambda: it.it.worker("d0").submits)
        messages = await aborted(it, call, "a")
        assert [end.finish_reason for end in ends(messages).values()] == ["abort", "abort"]
        assert all((end.prompt_tokens, end.completion_tokens) == (3, 0) for end in ends(messages).values())
        for name in ("p0", "d0"):
            await until(lambda name=name: it.it.worker(name).cancels.total() >= 1)


async def test_while_the_kv_is_on_its_way(tiny_llama_dir: Path) -> None:
    """Token 0 is out, the decode worker has said nothing."""
    async with engine(tiny_llama_dir, prefill(), decode(mute_after=0)) as it:
        call = it.stub.Generate(request("a"))
        first = await call.read()
        assert list(first.chunk.token_ids) == [10]
        await it.abort("a")
        await it.it.idle()
        end = await call.read()
        assert (end.complete.finish_reason, end.complete.cached_tokens) == ("abort", 5)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is Code.OK


async def test_while_it_decodes(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode(mute_after=7)) as it:
        call = it.stub.Generate(request("a"))
        messages: list[pb.GenerateResponse] = []
        while len(tokens(messages)) < 7:
            messages.append(await call.read())
        whole = asyncio.create_task(it.all(request("b", stream=False)))
        await until(lambda: len(it.it.worker("d0").submits) == 2)
        end = ends(await aborted(it, whole, "b", "a"))[0]
        assert end.finish_reason == "abort"
        assert list(end.output_ids) == list(range(10, 10 + end.completion_tokens))
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert ends(messages)[0].finish_reason == "abort"
        assert tokens(messages) == list(range(10, 17))


async def test_one_answer_has_ended_already(tiny_llama_dir: Path) -> None:
    stop = Tokenizer.from_dir(tiny_llama_dir).decode([13, 14])
    async with engine(tiny_llama_dir, prefill(), decode(mute_after=7)) as it:
        call = it.stub.Generate(request("a", n=2, stop=[stop]))
        messages: list[pb.GenerateResponse] = []
        while not ends(messages) or len(tokens(messages, 1)) < 7:
            messages.append(await call.read())
        await it.abort("a")
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert {index: end.finish_reason for index, end in ends(messages).items()} == {0: "stop", 1: "abort"}
        assert tokens(messages, 0) == [10, 11, 12, 13, 14]


async def test_while_a_long_text_is_tokenized(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(mute_after=0), decode(mute_after=0)) as it:
        calls = [
            asyncio.create_task(it.all(pb.GenerateRequest(request_id=f"t{i}", text="x" * (200 * i), stream=True)))
            for i in range(1, 11)
        ]
        async with asyncio.timeout(10):
            while not all(call.done() for call in calls):  # some come after an Abort
                await it.abort(*(f"t{i}" for i in range(1, 11)))
                await asyncio.sleep(0.01)
        for call in calls:
            try:
                messages = await call
            except grpc.aio.AioRpcError:  # it is too long
                continue
            assert ends(messages)[0].finish_reason == "abort"


async def test_an_unknown_one_is_no_error_and_a_second_time_is_none(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode(mute_after=3)) as it:
        await it.abort()
        await it.abort("nobody", "")
        call = asyncio.create_task(it.all(request("a")))
        await until(lambda: it.it.worker("d0").submits)
        await asyncio.gather(*(it.abort("a", "nobody", "a") for _ in range(5)))
        assert ends(await call)[0].finish_reason == "abort"
        await it.abort("a")
        error = await refusal(it.abort(*["x"] * 4097))
        assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "request_ids")


async def test_a_name_in_use_is_refused_and_free_again_afterwards(tiny_llama_dir: Path) -> None:
    async with engine(tiny_llama_dir, prefill(), decode(mute_after=3)) as it:
        call = asyncio.create_task(it.all(request("a")))
        await until(lambda: it.it.worker("d0").submits)
        error = await refusal(it.all(request("a")))
        assert (error.code(), field_of(error)) == (Code.ALREADY_EXISTS, "request_id")
        await it.abort("a")
        assert ends(await call)[0].finish_reason == "abort"
        it.it.worker("d0").script.mute_after = 1000
        assert ends(await it.all(request("a")))[0].finish_reason == "stop"
        unnamed = await asyncio.gather(it.all(request()), it.all(request()))
        assert [ends(messages)[0].finish_reason for messages in unnamed] == ["stop", "stop"]


async def test_of_a_client_that_does_not_read_all_is_free_at_once(tiny_llama_dir: Path) -> None:
    many = {"tokens": [10 + i % 200 for i in range(2000)]}
    async with (
        engine(tiny_llama_dir, prefill(**many), decode(**many)) as it,
        open_channel(it.it.address) as channel,
    ):
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request("a", logprobs=20, max_tokens=1900))
        messages = [await call.read()]
        await full(it)
        await it.abort("a")
        async with asyncio.timeout(2):
            await it.it.idle()
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert ends(messages)[0].finish_reason == "abort"
        assert 0 < len(tokens(messages)) < 1900
        assert tokens(messages) == many["tokens"][: len(tokens(messages))]  # what was sent is whole


async def test_of_a_client_that_never_reads_again_the_call_ends_too(tiny_llama_dir: Path) -> None:
    many = {"tokens": [10 + i % 200 for i in range(2000)]}
    async with (
        engine(tiny_llama_dir, prefill(**many), decode(**many), slow_reader_s=1) as it,
        open_channel(it.it.address) as channel,
    ):
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request("a", logprobs=20, max_tokens=1900))
        await call.read()
        await full(it)
        await it.abort("a")
        await it.it.idle()
        async with asyncio.timeout(10):
            while not await served(it, "a"):  # until the name is free again
                await asyncio.sleep(0.05)

        async def rest() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        assert "reads too slowly" in ((await refusal(rest())).details() or "")


async def served(it: Engine, name: str) -> bool:
    """Whether a request of this name is taken."""
    try:
        return bool(await it.all(request(name, max_tokens=1)))
    except grpc.aio.AioRpcError as error:
        assert error.code() is Code.ALREADY_EXISTS
        return False


async def test_racing_with_the_end(tiny_llama_dir: Path) -> None:
    """Each stream ends once, whoever was first, and in time."""
    draw = random.Random(5)
    async with engine(tiny_llama_dir, prefill(), decode(pause_s=0.001)) as it:
        reasons = set()
        for turn in range(8):
            names = [f"{turn}-{i}" for i in range(8)]
            calls = [asyncio.create_task(it.all(request(name, stream=i % 2 == 0))) for i, name in enumerate(names)]
            await asyncio.sleep(draw.uniform(0.0, 0.1))
            await it.abort(*names)
            for messages in await asyncio.gather(*calls):
                reasons.add(ends(messages)[0].finish_reason)
            await it.it.idle()
        assert reasons <= {"abort", "stop"}
        assert "abort" in reasons


async def test_tenants_have_names_of_their_own(tiny_llama_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    made = [new_key(tenant) for tenant in ("one", "two")]
    keys.write_text("".join(kept.line() + "\n" for _, kept in made))
    one, two = (key for key, _ in made)

    def who(key: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {key}"),)

    async with engine(tiny_llama_dir, prefill(), decode(mute_after=3), api_keys=keys) as it:
        calls = [asyncio.create_task(it.all(request("a"), metadata=who(key))) for key in (one, two)]
        await until(lambda: len(it.it.worker("d0").submits) == 2)
        await it.abort("a", metadata=who(one))
        assert ends(await calls[0])[0].finish_reason == "abort"
        assert not calls[1].done()
        assert (await refusal(it.abort("a"))).code() is Code.UNAUTHENTICATED
        await it.abort("a", metadata=who(two))
        assert ends(await calls[1])[0].finish_reason == "abort"
