import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from twostroke.engine.build import Engine, build_engine
from twostroke.engine.config import EngineOptions
from twostroke.engine.request import Request, SamplingParams, SequenceKey
from twostroke.engine.start_times import StartTimes
from twostroke.engine.tokenizer import Tokenizer
from twostroke.errors import ConfigError

SMALL = EngineOptions(dtype="float32", kv_memory=4 << 20)
TEXTS = [
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "水是生命之源，人类",
    "🎉🎉 party time 🎈",
    "a",
    "1, 2, 3, 5, 8, 13, 21, " * 12,
]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        engine.core.add(Request(SequenceKey(1, i, 0, 0), prompt, params))
        outputs[i] = []
    while engine.core.has_work():
        result = engine.core.step()
        assert not result.failures
        for output in result.outputs:
            outputs[output.key.request] += [token.token_id for token in output.tokens]
    engine.core.check_integrity(idle=True)
    return list(outputs.values())


def test_the_embedded_model_equals_transformers_in_fp32(smollm2_dir):
    tokenizer = Tokenizer.from_dir(smollm2_dir)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    engine = build_engine(smollm2_dir, EngineOptions(dtype="float32", kv_memory=128 << 20), fingerprint="f")
    outputs = run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    model = LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(dim=1).tolist() == output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_type_serves(tiny_llama_dir, dtype):
    engine = build_engine(tiny_llama_dir, EngineOptions(dtype=dtype, kv_memory=4 << 20), fingerprint="f")
    assert engine.pool.dtype == getattr(torch, dtype)
    outputs = run(engine, [[1, 2, 3], [4] * 40], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert [len(output) for output in outputs] == [5, 5]


def test_the_pool_lies_in_the_memory_given(tiny_llama_dir):
    given: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        given.append(torch.full((nbytes,), 0xFF, dtype=torch.uint8))  # NaN everywhere
        return given[0]

    engine = build_engine(tiny_llama_dir, SMALL, fingerprint="f", allocate=allocate)
    assert engine.pool.shape == engine.plan.shape
    assert engine.pool.data_ptr() == given[0].data_ptr()
    assert given[0].numel() == engine.plan.nbytes <= SMALL.kv_memory
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = build_engine(tiny_llama_dir, SMALL, fingerprint="f")
    assert run(engine, [[5, 6, 7], [8] * 33], params) == run(plain, [[5, 6, 7], [8] * 33], params)
    assert engine.core.pool.usable == engine.plan.pages - 1


def test_memory_of_another_size_is_refused(tiny_llama_dir):
    with pytest.raises(ConfigError, match="pool's memory"):
        build_engine(
            tiny_llama_dir, SMALL, fingerprint="f", allocate=lambda nbytes: torch.zeros(nbytes - 1, dtype=torch.uint8)
        )


def test_what_does_not_fit_is_refused_before_the_weights_are_read(tiny, tmp_path):
    path = tiny.make_tiny_llama(tmp_path / "m")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        build_engine(path, EngineOptions(kv_memory=1), fingerprint="f")
    assert caught.value.field == "kv_memory"
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        build_engine(path, SMALL, fingerprint="f")


def test_it_tells_where_memory_and_time_go(tiny_llama_dir):
    told = []
    engine = build_engine(
        tiny_llama_dir, SMALL, fingerprint="f", progress=lambda stage, done, total: told.append((stage, done, total))
    )
    assert engine.plan is engine.memory.kv
    assert engine.memory.device_memory > 1 << 28  # the machine's
    assert list(engine.times.to_dict()) == ["configuration", "weights", "pool", "runner", "vocabulary"]
    total = told[-1][2]
    assert told[-1] == ("weights", total, total)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert engine.memory.measured == {}  # a CPU's is not measured
    times = StartTimes()
    assert build_engine(tiny_llama_dir, SMALL, fingerprint="f", times=times).times is times


def test_random_weights_need_no_files(tiny, tmp_path):
    path = tiny.make_tiny_llama(tmp_path / "m")
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    engine = build_engine(path, replace(SMALL, load_format="dummy"), fingerprint="f")
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    assert len(run(engine, [[1, 2, 3]], params)[0]) == 5
    with pytest.raises(ConfigError, match="safetensors"):
        build_engine(path, SMALL, fingerprint="f")


def test_a_device_that_is_not_there_is_a_config_error(tiny_llama_dir):
    with pytest.raises(ConfigError, match="nonsense") as caught:
        build_engine(tiny_llama_dir, EngineOptions(device="nonsense"), fingerprint="f")
    assert caught.value.field == "device"


def test_threads_are_set_when_asked(tiny_llama_dir):
    before = torch.get_num_threads()
    try:
        build_engine(tiny_llama_dir, EngineOptions(threads=1, kv_memory=4 << 20), fingerprint="f")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
