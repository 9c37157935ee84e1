"""Every sampling control through real processes: `both` and 1P1D answer the same, alone and all at once."""

import asyncio
import math
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import pytest
import torch
import transformers

from twostroke.engine.tokenizer import Tokenizer
from twostroke.v1 import inference_pb2 as pb

from .harness import Answer, Launch, Stack

FLAGS = ("--dtype", "float32")
BOTH = ("--prefill", "0", "--decode", "0", "--both", "1")
TIGHT = ("--kv-memory", "1MiB", "--reserve", "prompt")  # 127 pages of 16 tokens: sequences push each other out
TOKENS = 40
PROMPT = "the cat and the dog were on the mat and the cat was the one that had it"

MATRIX: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-k and top-p": {"top_k": 30, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "typical-p": {"typical_p": 0.7, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.6, "temperature": 0.0},
    "presence": {"presence_penalty": 2.0, "temperature": 0.3},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.3},
    "bias": {"logit_bias": {50: 6.0, 60: 6.5, 70: -100.0}},
    "allowed": {"allowed_token_ids": list(range(100, 140)), "frequency_penalty": 3.0, "temperature": 0.0},
    "banned": {"banned_token_ids": list(range(100)), "temperature": 0.0},
    "bad words": {"bad_words": ["the", "an"], "temperature": 0.7},
    "everything": {
        "temperature": 0.8,
        "top_k": 100,
        "top_p": 0.98,
        "min_p": 0.001,
        "typical_p": 0.98,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {44: 3.0},
        "banned_token_ids": [45, 46],
        "bad_words": ["is", "of that"],
    },
}


def request(ids: Sequence[int], name: str, number: int, **fields: object) -> pb.GenerateRequest:
    """One of the matrix, with log-probabilities and a seed of its own; ends of text only after 30 tokens."""
    made = pb.GenerateRequest(
        input=pb.Input(token_ids=pb.TokenIds(ids=ids)),
        sampling=pb.Sampling(**{"seed": 1000 + number, **MATRIX[name]}),  # type: ignore[arg-type]
        stopping=pb.Stopping(max_tokens=TOKENS, min_tokens=30, token_ids=list(range(200, 260))),
        logprobs=2,
        **fields,  # type: ignore[arg-type]
    )
    return made


async def run_matrix(stack: Stack, prompts: Sequence[Sequence[int]], *, at_once: bool) -> list[Answer]:
    requests = [request([20 + i, *prompts[i % len(prompts)]], name, i) for i, name in enumerate(MATRIX)]
    if at_once:
        return list(await asyncio.gather(*(stack.client.generate(it) for it in requests)))
    return [await stack.client.generate(it) for it in requests]


def essence(answer: Answer) -> tuple[list[int], str, list[int]]:
    """What must be equal everywhere; log-probabilities by their tokens, as values may differ by rounding."""
    entries = [entry for message in answer.messages for entry in message.logprobs]
    assert len(entries) == len(answer.token_ids)
    return answer.token_ids, answer.text, [top.token_id for entry in entries for top in entry.top]


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tiny_dir)


async def test_a_matrix_of_controls(launch: Launch, tiny_dir: Path, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(PROMPT), tokenizer.encode("he"), tokenizer.encode(PROMPT * 6)]
    async with launch("--model", str(tiny_dir), *FLAGS, *BOTH) as stack:
        alone = await run_matrix(stack, prompts, at_once=False)
        await stack.whole()
    expected = [essence(answer) for answer in alone]
    assert len({tuple(tokens) for tokens, _, _ in expected}) == len(MATRIX)
    check_matrix(dict(zip(MATRIX, alone, strict=True)), tokenizer)
    for flags in ((), (*BOTH, *TIGHT), TIGHT, ("--token-budget", "24")):
        async with launch("--model", str(tiny_dir), *FLAGS, *flags) as stack:
            together = await run_matrix(stack, prompts, at_once=True)
            assert [essence(answer) for answer in together] == expected, flags
            await stack.whole()


def check_matrix(answers: dict[str, Answer], tokenizer: Tokenizer) -> None:
    """What a control promises is seen in the output."""
    for name, answer in answers.items():
        assert len(answer.token_ids) >= 30, name
        early = set(answer.token_ids[:30])
        assert not early & {0, 2, *range(200, 260)}, name
    assert set(answers["allowed"].token_ids) <= set(range(100, 140))
    assert not set(answers["banned"].token_ids) & set(range(100))
    assert not set(answers["everything"].token_ids) & {45, 46}
    for word in ("the", " the", "an", " an"):
        ids = tokenizer.encode(word)
        tokens = answers["bad words"].token_ids
        assert not any(tokens[i : i + len(ids)] == ids for i in range(len(tokens))), word


async def test_prompt_logprobs_equal_transformers(launch: Launch, tiny_dir: Path, tokenizer: Tokenizer) -> None:
    """Through P and D, in many chunks, beside each other and again past a warm cache; with one token too."""
    prompts = [tokenizer.encode(text) for text in (PROMPT * 4, PROMPT * 4 + " had", "at", PROMPT)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    for flags in (("--token-budget", "32"), BOTH):
        async with launch("--model", str(tiny_dir), *FLAGS, *flags) as stack:
            for most in (6, 1):
                requests = [request(ids, "greedy", i, prompt_logprobs=i) for i, ids in enumerate(prompts)]
                for it in requests:
                    it.stopping.max_tokens, it.stopping.min_tokens = most, 0
                answers = await asyncio.gather(*(stack.client.generate(it) for it in requests))
                for top, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
                    check_prompt(reference, ids, answer, top)
                    assert answer.finish.usage.cached_tokens == 0
            plain = await stack.client.generate(request(prompts[0], "greedy", 0))
            assert plain.finish.usage.cached_tokens >= len(prompts[0]) // 16 * 16 - 16
            await stack.whole()


def check_prompt(reference: torch.nn.Module, ids: Sequence[int], answer: Answer, top: int) -> None:
    """Each token of the prompt but the first, in the first message alone."""
    assert [bool(message.prompt_logprobs) for message in answer.messages[1:]] == [False] * (len(answer.messages) - 1)
    told = answer.messages[0].prompt_logprobs
    assert [entry.token_id for entry in told] == list(ids[1:])
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].double().log_softmax(dim=1)
    for position, entry in enumerate(told):
        assert math.isclose(entry.logprob, expected[position, entry.token_id].item(), abs_tol=2e-3)
        best = expected[position].topk(top).values.tolist()
        assert [other.logprob for other in entry.top] == pytest.approx(best, abs=2e-3)


async def test_stops(launch: Launch, tiny_dir: Path, tokenizer: Tokenizer) -> None:
    """Stop strings and stop tokens, included or not, and not before `min_tokens`."""
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:

        async def ask(**stopping: object) -> Answer:
            made = request(tokenizer.encode(PROMPT), "repetition", 0)
            made.stopping.CopyFrom(pb.Stopping(max_tokens=TOKENS, ignore_eos=True, **stopping))  # type: ignore[arg-type]
            return await stack.client.generate(made)

        whole = await ask()
        assert len(whole.token_ids) == TOKENS
        stop = next(word for i in range(10, 30) if "\ufffd" not in (word := whole.text[i : i + 3]))
        cut = whole.text.index(stop)
        excluded, included = await ask(strings=[stop]), await ask(strings=[stop], include_stop=True)
        assert (excluded.text, included.text) == (whole.text[:cut], whole.text[: cut + len(stop)])
        assert excluded.token_ids == included.token_ids == whole.token_ids[: len(excluded.token_ids)]
        late = await ask(strings=[stop], min_tokens=TOKENS)
        assert late.text == whole.text
        token = whole.token_ids[20]
        first = whole.token_ids.index(token)
        ended, shown = await ask(token_ids=[token]), await ask(token_ids=[token], include_stop=True)
        assert ended.token_ids == shown.token_ids == whole.token_ids[: first + 1]
        assert shown.text == tokenizer.decode(shown.token_ids)
        assert shown.text.startswith(ended.text)
        later = await ask(token_ids=[token], min_tokens=30)
        assert token not in later.token_ids[:30]
        assert later.token_ids[:first] == whole.token_ids[:first]
        await stack.whole()


async def test_a_replay_knows_prompt_and_output_apart(launch: Launch, tiny_dir: Path, tokenizer: Tokenizer) -> None:
    """The decode worker is killed under every control at once: penalties, bad words, min_tokens go on as they were."""
    prompt = tokenizer.encode(PROMPT)
    requests = []
    for number, name in enumerate(MATRIX):
        made = request([20 + number, *prompt], name, number, prompt_logprobs=1)
        made.stopping.CopyFrom(pb.Stopping(max_tokens=700, min_tokens=690, ignore_eos=number % 2 > 0))
        requests.append(made)
    async with launch("--model", str(tiny_dir), *FLAGS) as stack:
        expected = [essence(answer) for answer in await asyncio.gather(*map(stack.client.generate, requests))]
        calls = [stack.client.call(it) for it in requests]
        answers = [Answer() for _ in calls]
        for call, answer in zip(calls, answers, strict=True):
            while len(answer.token_ids) < 20:
                answer.take(await call.read())
        stack.signal("decode-0", signal.SIGKILL)
        for call, answer in zip(calls, answers, strict=True):
            while (message := await call.read()) is not grpc.aio.EOF:
                answer.take(message)
        assert [essence(answer) for answer in answers] == expected
        assert all(answer.finish.replays > 0 for answer in answers)
        for answer in answers:
            assert [len(message.prompt_logprobs) for message in answer.messages if message.prompt_logprobs] == [
                len(prompt)
            ]
