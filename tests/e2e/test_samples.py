"""`n` answers to one prompt through real processes: computed once, transferred once, each with an end of its own."""

import asyncio
import contextlib
from collections.abc import Sequence

import grpc.aio
import pytest

from twostroke.v1 import inference_pb2 as pb

from .harness import Answer, Client, Launch, Stack, token_request

PROMPT = [3 + 7 * index % 250 for index in range(70)]  # 4 full pages and 6 tokens
BORDER = PROMPT[:64]
FLAGS = ("--dtype", "float32")
BOTH = ("--prefill", "0", "--decode", "0", "--both", "1")


async def answers(client: Client, request: pb.GenerateRequest) -> list[Answer]:
    """Each sample's stream, checked like one of its own."""
    told = [Answer() for _ in range(request.n or 1)]
    async for message in client.call(request):
        told[message.sample].take(message)
    assert all(answer.messages and answer.messages[-1].HasField("finish") for answer in told)
    return told


async def ids(
    client: Client, prompt: Sequence[int], n: int, *, max_tokens: int = 24, **sampling: object
) -> list[list[int]]:
    request = token_request(prompt, max_tokens=max_tokens, **sampling)
    request.n = n
    return [answer.token_ids for answer in await answers(client, request)]


async def counts(stack: Stack, *before: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Of P and D: tokens prefilled, pages pushed, tickets, less those `before`."""
    now = []
    for name in ("prefill-0", "decode-0"):
        status = await stack.status(name)
        now.append((status.prefilled_tokens, status.pushed_pages, status.tickets))
    for place, earlier in enumerate(before):
        now[place] = tuple(a - b for a, b in zip(now[place], earlier, strict=True))
    return now


async def test_n_answers_cost_one_prefill_and_one_transfer(launch: Launch, tiny_dir) -> None:
    seeded = {"temperature": 1.0, "seed": 42}
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:
        client = stack.client
        before = await counts(stack)
        four = await ids(client, PROMPT, 4, **seeded)
        await stack.whole()
        assert await counts(stack, *before) == [(70, 5, 1), (0, 0, 1)]
        assert len({tuple(answer) for answer in four}) == 4
        assert [len(answer) for answer in four] == [24] * 4
        assert await ids(client, PROMPT, 2, **seeded) == four[:2]
        assert await ids(client, PROMPT, 1, **seeded) == four[:1]
        before = await counts(stack)
        border = await ids(client, [5, *BORDER[1:]], 4, **seeded)
        await stack.whole()
        assert await counts(stack, *before) == [(64, 4, 1), (0, 0, 1)]
        greedy = await ids(client, PROMPT, 3)
        assert greedy == [greedy[0]] * 3
        assert greedy[0] == (await client.tokens(PROMPT, max_tokens=24)).token_ids
        single = await ids(client, PROMPT, 3, max_tokens=1, **seeded)
        assert single == [answer[:1] for answer in four[:3]]
        several = await asyncio.gather(*(ids(client, PROMPT, 4, **seeded) for _ in range(6)))
        assert several == [four] * 6
        await stack.whole()
    async with launch("--model", str(tiny_dir), *FLAGS, *BOTH) as stack:
        assert await ids(stack.client, PROMPT, 4, **seeded) == four
        assert await ids(stack.client, [5, *BORDER[1:]], 4, **seeded) == border
        assert await ids(stack.client, PROMPT, 3) == greedy
        await stack.whole()


async def test_each_answer_ends_by_itself(launch: Launch, tiny_dir) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:
        free = await ids(stack.client, PROMPT, 4, temperature=1.0, seed=7)
        for ended, index in (((0,), 0), ((1, 3), 0), ((0, 1, 2, 3), 0), ((2,), 5), ((0, 1), 9)):
            stops = {free[sample][index] for sample in ended}
            request = token_request(PROMPT, max_tokens=24, temperature=1.0, seed=7)
            request.n = 4
            request.stopping.token_ids.extend(stops)
            told = await answers(stack.client, request)
            for sample, answer in enumerate(told):
                cut = next((at for at, token in enumerate(free[sample]) if token in stops), 23)
                assert answer.token_ids == free[sample][: cut + 1]
                by_stop = answer.token_ids[-1] in stops
                assert answer.finish.reason == (pb.FINISH_REASON_STOP if by_stop else pb.FINISH_REASON_LENGTH)
                usage = answer.finish.usage
                assert (usage.prompt_tokens, usage.output_tokens) == (70, cut + 1)
        await stack.whole()


async def test_a_stop_string_ends_one_answer_only(launch: Launch, tiny_dir) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:
        request = token_request(PROMPT, max_tokens=40, temperature=1.0, seed=11)
        request.n = 4
        whole = [answer.text for answer in await answers(stack.client, request)]
        word = next(
            text[at : at + 3]
            for text in whole
            for at in range(2, len(text) - 3)
            if 0 < sum(text[at : at + 3] in other for other in whole) < 4 and text[at : at + 3].isprintable()
        )
        request.stopping.strings.append(word)
        told = await answers(stack.client, request)
        for text, answer in zip(whole, told, strict=True):
            assert answer.text == text.split(word)[0]
            assert (answer.finish.stop_string == word) == (word in text)
        await stack.whole()


async def test_small_pools_many_answers_and_clients_that_go(launch: Launch, tiny_dir) -> None:
    """Preemption, cancels in the middle: everything comes back, what stays is right."""
    flags = ("--kv-memory", "1MiB", "--max-batch", "12", "--reserve", "prompt")
    async with launch("--model", str(tiny_dir), *FLAGS, *flags) as stack:
        prompts = [[number, *PROMPT[: 5 + 13 * number]] for number in range(1, 6)]
        alone = [await ids(stack.client, prompt, 4, max_tokens=40, temperature=1.0, seed=3) for prompt in prompts]

        async def leaves(prompt: Sequence[int]) -> None:
            request = token_request(prompt, max_tokens=200, temperature=1.0, seed=3)
            request.n = 4
            call = stack.client.call(request)
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                async for message in call:
                    if message.first_index > 3:
                        call.cancel()

        work = [ids(stack.client, prompt, 4, max_tokens=40, temperature=1.0, seed=3) for prompt in prompts]
        together, _ = await asyncio.gather(asyncio.gather(*work), asyncio.gather(*map(leaves, prompts)))
        assert together == alone
        await stack.whole()


@pytest.mark.parametrize(("n", "flags"), [(17, ()), (5, ("--max-batch", "4"))])
async def test_what_never_fits_is_refused(launch: Launch, tiny_dir, n: int, flags: tuple[str, ...]) -> None:
    async with launch("--model", str(tiny_dir), *FLAGS, *flags) as stack:
        request = token_request(PROMPT, max_tokens=4)
        request.n = n
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answers(stack.client, request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n is" in (refused.value.details() or "")
        await stack.whole()
