"""What choosing workers by prefix brings in larger fleets, without engines: the gateway's own router and page digests
over a chat of many groups, each with a long system prompt of its own; workers are caches and queues. Deterministic.

`python benchmarks/prefix_simulation.py [--quick]`. `benchmarks/prefix.py` measures the same on a real stack.
"""

import argparse
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from record import Recorder
from rich.console import Console
from rich.table import Table

from twostroke.services.gateway.prefixes import prefix_digests
from twostroke.services.gateway.router import Role, WorkerLoad, choose

PAGE = 16
VOCABULARY = range(1000, 20_000)
ROUTINGS: tuple["Routing", ...] = ("prefix", "load", "random")
Routing = Literal["prefix", "load", "random"]


@dataclass(frozen=True)
class Chat:
    """The shape of a load; lengths in tokens."""

    groups: int = 24
    conversations: int = 8  # of a group
    turns: int = 5
    system: int = 1024
    user: int = 64
    answer: int = 128

    def prompts(self, seed: int) -> Iterator[list[int]]:
        """As they arrive: whose turn it is, is random; each holds all that was said before in its conversation."""
        chance = random.Random(seed)
        said = []
        for _ in range(self.groups):
            system = chance.choices(VOCABULARY, k=self.system)
            said += [list(system) for _ in range(self.conversations)]
        order = list(range(len(said))) * self.turns
        chance.shuffle(order)
        for speaker in order:
            said[speaker] += chance.choices(VOCABULARY, k=self.user)
            yield list(said[speaker])
            said[speaker] += chance.choices(VOCABULARY, k=self.answer)


@dataclass
class Worker:
    """A queue of tokens to compute, and the pages that it has, the least recently used leaving first."""

    load: WorkerLoad
    computed: int = 0  # tokens
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def leading(self, chain: Sequence[bytes]) -> int:
        """How many leading pages it has."""
        return next((depth for depth, page in enumerate(chain) if page not in self.pages), len(chain))

    def run(self, chain: Sequence[bytes], tokens: int) -> int:
        """Takes a prompt in; returns the tokens that it had cached, of which the last one is not: it is computed."""
        cached = self.leading(chain[: (tokens - 1) // PAGE]) * PAGE
        self.computed += tokens - cached
        self.load.waiting_tokens += tokens - cached
        for page in reversed(chain):  # so that a prefix's first pages leave last
            self.pages[page] = None
            self.pages.move_to_end(page)
        while len(self.pages) > self.load.pages:
            self.pages.popitem(last=False)
        return cached


@dataclass
class Outcome:
    """Of a whole chat."""

    prompt: int = 0
    cached: int = 0
    imbalance: float = 0.0  # tokens that the busiest prefill worker computed, by the mean

    @property
    def share(self) -> float:
        """Of prompt tokens, those that were cached."""
        return self.cached / self.prompt if self.prompt else 0.0


def fleet(pairs: int, pages: int) -> list[Worker]:
    """So many prefill and as many decode workers with pools of `pages` pages."""
    kinds = [(Role.PREFILL, "p"), (Role.DECODE, "d")]
    return [
        Worker(
            WorkerLoad(
                name=f"{letter}{number}", incarnation=1 + number + pairs * place, role=role, pages=pages,
                page_size=PAGE, max_batch=64, max_tokens=1 << 20, free_pages=pages,
            )
        )
        for place, (role, letter) in enumerate(kinds)
        for number in range(pairs)
    ]  # fmt: skip


def simulate(prompts: Iterator[list[int]], routing: Routing, *, pairs: int, pages: int, drained: int) -> Outcome:
    """Sends the prompts through the router. `drained`: tokens that a prefill worker computes between two arrivals."""
    workers, chance, outcome = fleet(pairs, pages), random.Random(0), Outcome()
    by_incarnation = {worker.load.incarnation: worker for worker in workers}
    for prompt in prompts:
        chain = prefix_digests([*prompt, 0], PAGE, b"simulated")  # of all full pages
        met = {w.load.incarnation: w.leading(chain) for w in workers} if routing == "prefix" else {}
        able = workers
        if routing == "random":
            able = [chance.choice(workers[:pairs]), chance.choice(workers[pairs:])]
        route = choose([worker.load for worker in able], len(prompt), 128, met)
        if route is None or route.prefill is None:
            raise RuntimeError("no pair was found")
        outcome.prompt += len(prompt)
        outcome.cached += by_incarnation[route.prefill].run(chain, len(prompt))
        by_incarnation[route.decode].run(chain, len(prompt))
        for worker in workers:
            worker.load.waiting_tokens = max(0, worker.load.waiting_tokens - drained)
    computed = [worker.computed for worker in workers[:pairs]]
    outcome.imbalance = max(computed) * pairs / max(1, sum(computed))
    return outcome


def main() -> None:
    """Prints a table; records it unless `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller chat, nothing is recorded")
    quick = parser.parse_args().quick
    chat = Chat(groups=6, conversations=4, turns=3) if quick else Chat()
    recorder = None if quick else Recorder("prefix")
    title = f"{chat.groups} groups of {chat.conversations} conversations, {chat.turns} turns"
    table = Table("workers", "pages each", "routing", "cached tokens", "busiest by mean", title=title)
    for pairs, pages in ((2, 4096), (2, 1024), (8, 4096), (8, 1024)):
        for routing in ROUTINGS:
            outcome = simulate(chat.prompts(1), routing, pairs=pairs, pages=pages, drained=400 // pairs)
            table.add_row(f"{pairs}P{pairs}D", str(pages), routing, f"{outcome.share:.1%}", f"{outcome.imbalance:.2f}")
            if recorder is not None:
                recorder.add(
                    "prefix", outcome.share, "share of prompt tokens cached", mode="simulated",
                    workers=f"{pairs}P{pairs}D", pages=pages, routing=routing, imbalance=round(outcome.imbalance, 3),
                )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
