"""The GPU's runner where steps are odd: against what the plain runner makes of the same requests."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.cuda import runner as cuda_runner
from twostroke.engine.cuda.graphs import DecodeGraphs, DrawGraphs
from twostroke.engine.cuda.runner import CudaRunner
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work, sample_keys
from twostroke.engine.runner import ModelRunner
from twostroke.engine.weights import load_weights

PAGES = 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)


class Replayed(DecodeGraphs):
    """Decode graphs without a GPU: what would be captured is launched again, on the same memory."""

    def __init__(self, runner: CudaRunner, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self._launches = {size: runner._padding_step(size) for size in sizes}
        self._left = {size: launch().clone() for size, launch in self._launches.items()}
        self.replayed: list[int] = []

    def size_for(self, rows: int) -> int:
        return next((size for size in self.sizes if size >= rows), 0)

    def replay(self, size: int) -> Tensor:
        self.replayed.append(size)
        return self._left[size].copy_(self._launches[size]())

    def logits(self, size: int) -> Tensor:
        return self._left[size]


class ReplayedDraws(DrawGraphs):
    """The same of how tokens are drawn."""

    def __init__(self) -> None:
        self._launches: dict[tuple[int, bool], Callable[[], None]] = {}
        self.replayed: list[tuple[int, bool]] = []

    def capture(self, size: int, random: bool, launch: Callable[[], None]) -> None:
        self._launches[size, random] = launch

    def replay(self, size: int, random: bool) -> None:
        self.replayed.append((size, random))
        self._launches[size, random]()


@pytest.fixture(scope="module")
def model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tiny.make_tiny_llama(tmp_path_factory.mktemp("edges"), hidden=64, layers=1, context=256)
    return path


def build(path: Path, runner: type[Any], **options: Any) -> EngineCore:
    config = ModelConfig.from_dir(path)
    chosen = EngineOptions(**{"dtype": "float32", "page_size": 16, "max_batch": 4, "token_budget": 64, **options})
    device = DEVICE if runner is CudaRunner else "cpu"
    shape = (config.layers, PAGES, 2, config.kv_heads, chosen.page_size, config.head_dim)
    pool = torch.full(shape, float("nan"), device=device)  # what was not written must not be seen
    return EngineCore(
        runner(config, load_weights(path, config, torch.float32, device), chosen, pool),
        chosen,
        pages=PAGES,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        cache_root=b"x",
    )


def ask(
    core: EngineCore,
    number: int,
    tokens: int,
    work: Work = Work.ALL,
    samples: int = 1,
    params: SamplingParams = HOT,
) -> SequenceKey:
    ids = [(number * 37 + 5 * at) % 200 + 3 for at in range(tokens)]
    request = Request(SequenceKey(1, number, 0, 0), ids, params, work, samples=samples)
    core.add(request)
    return request.key


def step(core: EngineCore, told: dict[SequenceKey, list[int]]) -> None:
    result = core.step()
    assert not result.failures
    for output in result.outputs:
        told.setdefault(output.key, []).extend(token.token_id for token in output.tokens)
    core.check_integrity()


def drain(core: EngineCore, told: dict[SequenceKey, list[int]] | None = None) -> dict[SequenceKey, list[int]]:
    told = {} if told is None else told
    while core.has_work():
        step(core, told)
    return told


def with_graphs(core: EngineCore, *sizes: int) -> Replayed:
    runner = core._runner
    assert isinstance(runner, CudaRunner)
    with torch.inference_mode():
        runner.graphs = graphs = Replayed(runner, sizes)
        runner._draws._graphs = ReplayedDraws()
        runner._capture_draws()
    return graphs


def test_more_samples_than_the_batch_holds_end_their_prompts_in_one_step(model: Path) -> None:
    """On a prefill worker a prompt takes one place, however many first tokens it draws."""
    answers = []
    for runner in (ModelRunner, CudaRunner):
        core = build(model, runner, max_batch=2)
        for number, tokens in enumerate((7, 1)):
            ask(core, number, tokens, Work.PREFILL, samples=9)
        answers.append(drain(core))
    assert answers[0] == answers[1]
    assert len(answers[0]) == 18


def test_cancelled_samples_are_drawn_beside_a_full_batch(model: Path) -> None:
    """A prompt draws for the samples that it had; those cancelled since have given up their places."""
    answers = []
    for runner in (ModelRunner, CudaRunner):
        core = build(model, runner, max_batch=4)
        wide = ask(core, 0, 6, samples=4)
        for key in sample_keys(wide, 4)[1:]:
            core.cancel(key)
        for number in (1, 2, 3):
            ask(core, number, 5)
        answers.append(drain(core))
    assert answers[0] == answers[1]


def test_a_prompt_of_one_token_for_several_samples_beside_sequences_that_decode(model: Path) -> None:
    """Such a step has the form of one that decodes, but more draws than rows."""
    answers = []
    for runner in (ModelRunner, CudaRunner):
        core = build(model, runner, max_batch=6)
        graphs = with_graphs(core, 1, 2, 4, 6) if runner is CudaRunner else None
        told: dict[SequenceKey, list[int]] = {}
        ask(core, 0, 5)
        step(core, told)
        step(core, told)
        ask(core, 1, 1, samples=3)
        ask(core, 2, 1)
        answers.append(drain(core, told))
    assert graphs is not None
    assert len(graphs.replayed) > 3
    assert answers[0] == answers[1]


def test_a_token_budget_below_the_batch(model: Path) -> None:
    """No step, a captured one with its padding rows neither, has more rows than the budget has tokens."""
    answers = []
    for runner in (ModelRunner, CudaRunner):
        core = build(model, runner, max_batch=40, token_budget=16)
        if runner is CudaRunner:
            with_graphs(core, core._options.max_batch)
        for number in range(3):
            ask(core, number, 2)
        answers.append(drain(core))
    assert answers[0] == answers[1]


MIXED = (
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.01, seed=8, max_tokens=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.0, typical_p=0.8, seed=4, max_tokens=2, ignore_eos=True),  # by the plain sampler
)


def test_tokens_of_captured_steps_are_drawn_as_any_others(model: Path) -> None:
    """Greedy and not, beside padding, with log-probabilities, and where a step's tokens come from the plain sampler."""
    answers = []
    for runner in (ModelRunner, CudaRunner):
        core = build(model, runner, max_batch=6)
        if runner is CudaRunner:
            with_graphs(core, 1, 4, 6)
        for number, params in enumerate(MIXED):
            ask(core, number, 3 + number, params=params)
        answers.append(drain(core))
    draws = core._runner._draws._graphs  # type: ignore[attr-defined]
    assert {random for _, random in draws.replayed} == {False, True}
    assert {size for size, _ in draws.replayed} >= {1, 4}
    assert answers[0] == answers[1]


def test_more_new_pages_than_a_captured_step_takes_along(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence of this step begins a page: the device is told of most of them before it."""
    answers = []
    for runner, room in ((ModelRunner, 0), (CudaRunner, 1), (CudaRunner, 512)):
        monkeypatch.setattr(cuda_runner, "CAPTURED_UPDATES", room)
        core = build(model, runner, max_batch=6)
        if runner is CudaRunner:
            with_graphs(core, 6)
        page = core._options.page_size
        for number in range(5):
            ask(core, number, page)  # the first token drawn lies on the next page
        answers.append(drain(core))
    assert answers[0] == answers[1] == answers[2]


def test_a_rehearsal_between_steps_changes_nothing(model: Path) -> None:
    answers = []
    for rehearsed in (0, 5):
        core = build(model, CudaRunner, max_batch=4)
        with_graphs(core, 2, 4)
        told: dict[SequenceKey, list[int]] = {}
        for number in range(3):
            ask(core, number, 4 + number)
            drain(core, told)
            for _ in range(rehearsed):
                core._runner.rehearse()  # type: ignore[attr-defined]
        answers.append(told)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
