"""Shared prefixes: the time to the first token with a cold and a warm cache; what choosing workers by prefix brings.

`make bench-prefix`, or `python benchmarks/prefix.py [--model NAME] [--quick]`. One machine, 2P2D, real processes. The
chat: conversations that share a system prompt, each turn with all that was said before; whose turn it is, is random.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import grpc
import stack
from record import Recorder
from rich.console import Console
from rich.table import Table

from twostroke.v1 import inference_pb2 as pb

MODEL = "smollm2-135m"
FLAGS = ("--prefill", "2", "--decode", "2", "--dtype", "bfloat16", "--kv-memory", "256MiB")
ROUTINGS = ("prefix", "load", "random")
SYSTEM, OWN, TURN, ANSWER = 256, 128, 32, 16  # tokens
VOCABULARY = range(1000, 20_000)


def words(chance: random.Random, count: int) -> list[int]:
    """Tokens that mean nothing."""
    return [chance.choice(VOCABULARY) for _ in range(count)]


def all_there(running: stack.Running) -> None:
    """Waits until all four workers are met."""
    while True:
        try:
            model = running.stub.GetModel(pb.GetModelRequest(), timeout=2)
            if (model.prefill_workers, model.decode_workers) == (2, 2):
                return
        except grpc.RpcError:
            pass
        time.sleep(0.2)


def first_token_ms(finishes: Sequence[pb.Finish]) -> float:
    """Median, by the gateway's clock."""
    return statistics.median(finish.timings.first_token_us for finish in finishes) / 1e3


def cold_and_warm(running: stack.Running, prompts: int, length: int) -> tuple[float, float]:
    """Median time to the first token of new prompts, and of the same ones again, in ms."""
    chance = random.Random(1)
    asked = [words(chance, length) for _ in range(prompts)]
    running.generate(words(chance, length), max_tokens=2)  # pages and caches of the machine
    cold = [running.generate(prompt, max_tokens=2) for prompt in asked]
    time.sleep(2.5)  # workers tell what they have each second
    warm = [running.generate(prompt, max_tokens=2) for prompt in asked]
    return first_token_ms(cold), first_token_ms(warm)


def chat(running: stack.Running, conversations: int, turns: int) -> tuple[float, float]:
    """(share of prompt tokens that were cached, median time to the first token in ms) of all turns."""
    chance = random.Random(2)
    system = words(chance, SYSTEM)
    said = [system + words(chance, OWN) for _ in range(conversations)]
    order = [i for i in range(conversations) for _ in range(turns)]
    chance.shuffle(order)
    finishes = []
    for speaker in order:
        said[speaker] += words(chance, TURN)
        finishes.append(running.generate(said[speaker], max_tokens=ANSWER))
        said[speaker] += words(chance, ANSWER)  # stands for the answer; greedy tokens of noise are no text either
    prompt = sum(finish.usage.prompt_tokens for finish in finishes)
    return sum(finish.usage.cached_tokens for finish in finishes) / prompt, first_token_ms(finishes)


def main() -> None:
    """Measures, prints, records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, nothing is recorded")
    arguments = parser.parse_args()
    prompts, length, conversations, turns = (3, 700, 6, 3) if arguments.quick else (8, 1500, 16, 5)
    recorder = None if arguments.quick else Recorder("prefix")
    table = Table("routing", "cached tokens", "TTFT of the chat", "cold TTFT", "warm TTFT")
    for routing in ROUTINGS:
        with stack.running(arguments.model, *FLAGS, "--routing", routing) as running:
            all_there(running)
            share, ttft = chat(running, conversations, turns)
            cold, warm = cold_and_warm(running, prompts, length) if routing == "prefix" else (0.0, 0.0)
        table.add_row(
            routing, f"{share:.0%}", f"{ttft:.1f} ms", *((f"{cold:.1f} ms", f"{warm:.1f} ms") if cold else ("", ""))
        )
        if recorder is not None:
            point = {"model": arguments.model, "routing": routing, "workers": "2P2D"}
            recorder.add("prefix_hit_rate", share, "share", conversations=conversations, turns=turns, **point)
            recorder.add("prefix_chat_ttft", ttft, "ms", conversations=conversations, turns=turns, **point)
            if cold:
                recorder.add("prefix_ttft", cold, "ms", cache="cold", context=length, **point)
                recorder.add("prefix_ttft", warm, "ms", cache="warm", context=length, **point)
    Console().print(table)


if __name__ == "__main__":
    main()
