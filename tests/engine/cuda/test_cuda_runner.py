"""The runner on a GPU, or under Triton's interpreter, against the plain one: the same tokens of the same steps."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.engine.batch import Row
from twostroke.engine.config import EngineOptions
from twostroke.engine.core import EngineCore
from twostroke.engine.cuda.runner import CudaRunner
from twostroke.engine.cuda.state import DeviceState
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.request import Request, SamplingParams, SequenceKey, Token
from twostroke.engine.runner import ModelRunner
from twostroke.engine.weights import load_weights

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[2] / "tiny_models.py")
assert spec is not None
assert spec.loader is not None
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

PAGES = 60
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = ["llama3", "gemma2"]  # grouped heads; windows, caps, norms behind sub-layers, scaled embeddings


def build(path: Path, runner: type[Any], **options: Any) -> EngineCore:
    config = ModelConfig.from_dir(path)
    chosen = EngineOptions(**{"dtype": "float32", "page_size": 16, "max_batch": 6, "token_budget": 48, **options})
    device = DEVICE if runner is CudaRunner else "cpu"
    shape = (config.layers, PAGES, 2, config.kv_heads, chosen.page_size, config.head_dim)
    pool = torch.full(shape, float("nan"), device=device)  # what was not written must not be seen
    weights = load_weights(path, config, torch.float32, device)
    return EngineCore(
        runner(config, weights, chosen, pool),
        chosen,
        pages=PAGES,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        cache_root=b"x",
    )


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_models.VOCAB, (length,), generator=generator).tolist()


def requests(tokens: int) -> list[Request]:
    """Chunks over several steps, a shared prefix, several samples, draws of all kinds."""
    shared = prompt(35, 9)
    each = [
        (prompt(5, 0), SamplingParams(temperature=0.0, logprobs=3), 1),
        (prompt(70, 1), SamplingParams(temperature=0.8, seed=7), 1),
        (shared, SamplingParams(temperature=0.0, prompt_logprobs=1), 1),
        ([*shared, 5, 6], SamplingParams(temperature=1.2, top_k=30, top_p=0.9, min_p=0.01, seed=1 << 63), 2),
        (prompt(17, 2), SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=2), 1),
        (prompt(1, 3), SamplingParams(temperature=0.9, typical_p=0.8, seed=3), 1),
    ]
    return [
        Request(SequenceKey(1, i, 0, 0), ids, replace(params, max_tokens=tokens, ignore_eos=True), samples=samples)
        for i, (ids, params, samples) in enumerate(each)
    ]


def serve(core: EngineCore, wanted: list[Request]) -> tuple[dict[SequenceKey, list[Token]], list[Any]]:
    told: dict[SequenceKey, list[Token]] = {}
    prompts: list[Any] = []
    for request in wanted:
        core.add(request)
    while core.has_work():
        result = core.step()
        assert not result.failures
        for output in result.outputs:
            told.setdefault(output.key, []).extend(output.tokens)
            if output.prompt_logprobs is not None:
                prompts.append(output.prompt_logprobs)
    core.check_integrity(idle=True)
    return told, prompts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in tiny_models.MODELS]
)
def test_the_same_tokens_as_the_plain_runner(tmp_path: Path, name: str) -> None:
    tiny_models.make_model(tmp_path, name)
    tokens = 4 if torch.cuda.is_available() else 2  # the interpreter takes half a second for a step
    expected, scored = serve(build(tmp_path, ModelRunner), requests(tokens))
    got, also_scored = serve(build(tmp_path, CudaRunner), requests(tokens))
    assert got.keys() == expected.keys()
    for key, tokens in expected.items():
        assert [token.token_id for token in got[key]] == [token.token_id for token in tokens], key
        for mine, plain in zip(got[key], tokens, strict=True):
            assert [i for i, _ in mine.logprobs] == [i for i, _ in plain.logprobs]
            assert [v for _, v in mine.logprobs] == pytest.approx([v for _, v in plain.logprobs], abs=1e-4)
    for mine, plain in zip(also_scored, scored, strict=True):
        assert (mine.first_position, list(mine.ids)) == (plain.first_position, list(plain.ids))
        assert list(mine.values) == pytest.approx(list(plain.values), abs=1e-4)


@pytest.mark.gpu  # the interpreter's products are numpy's, whose last bits depend on a column's place
def test_a_batch_invariant_runner_gives_the_same_bits_alone_and_among_others(tmp_path: Path) -> None:
    """Logits are compared by log-probabilities, bit for bit: whatever the chunks, the neighbours and the prefix."""
    tiny_models.make_model(tmp_path, "llama3")
    wanted = Request(SequenceKey(1, 0, 0, 0), prompt(40, 1), SamplingParams(temperature=0.0, logprobs=4, max_tokens=4))
    alone, _ = serve(build(tmp_path, CudaRunner, batch_invariant=True), [wanted])
    core = build(tmp_path, CudaRunner, batch_invariant=True, token_budget=21)
    others = [
        Request(SequenceKey(1, n, 0, 0), prompt(n * 9, n), SamplingParams(temperature=0.0, max_tokens=5))
        for n in (2, 3)
    ]
    among, _ = serve(core, [*others, wanted])
    again, _ = serve(core, [wanted])  # its prefix is cached
    assert among[wanted.key] == alone[wanted.key] == again[wanted.key]


def test_a_trace_shows_every_layer(tmp_path: Path) -> None:
    tiny_models.make_model(tmp_path, "gemma2")
    streams: list[list[torch.Tensor]] = [[], []]
    logits = []
    for seen, runner in zip(streams, (ModelRunner, CudaRunner), strict=True):
        core = build(tmp_path, runner)
        own = core._runner.trace(prompt(30, 4), lambda stream, seen=seen: seen.append(stream.cpu().clone()))  # type: ignore[attr-defined]
        logits.append(own.cpu())
    assert len(streams[0]) == len(streams[1]) == 1 + ModelConfig.from_dir(tmp_path).layers
    for plain, mine in zip(*streams, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


class TestState:
    def row(self, number: int, pages: list[int]) -> Row:
        return Row(SequenceKey(1, number, 0, 0), [0], 0, pages, SamplingParams(), True)

    def test_only_what_is_new_is_told(self) -> None:
        state, pages = DeviceState(4, 8, torch.device("cpu")), [3, 4]
        updates: list[int] = []
        slot = state.place(self.row(1, pages), updates)
        assert slot != 0
        assert updates == [slot, 0, 3, slot, 1, 4]
        assert state.place(self.row(1, pages), updates) == slot
        pages.append(9)
        updates.clear()
        assert state.place(self.row(1, pages), updates) == slot
        assert updates == [slot, 2, 9]

    def test_a_sequence_that_lost_its_pages_is_told_anew(self) -> None:
        state = DeviceState(4, 8, torch.device("cpu"))
        updates: list[int] = []
        slot = state.place(self.row(1, [3, 4]), updates)
        updates.clear()
        assert state.place(self.row(1, [3, 4]), updates) == slot  # equal, but another list
        assert updates == [slot, 0, 3, slot, 1, 4]

    def test_slots_of_those_long_gone_are_given_anew(self) -> None:
        state = DeviceState(3, 8, torch.device("cpu"))
        slots = [state.place(self.row(number, [1]), []) for number in range(6)]
        assert sorted(slots) == [1, 2, 3, 4, 5, 6]
        state.place(self.row(0, [1]), [])
        assert state.place(self.row(7, [1]), []) == slots[1], "the least recently used"
        updates: list[int] = []
        assert state.place(self.row(1, [1]), updates) == slots[2]
        assert updates == [slots[2], 0, 1]
