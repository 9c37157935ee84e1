import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twostroke.engine import footprint
from twostroke.engine.config import EngineOptions
from twostroke.engine.cuda.buffers import Buffers
from twostroke.engine.cuda.state import DeviceState
from twostroke.engine.dummy_weights import dummy_weights
from twostroke.engine.linear import Linear
from twostroke.engine.memory_plan import MemoryPlan, longest, memory_limit, plan_memory
from twostroke.engine.model_config import ModelConfig
from twostroke.engine.scoring import HEAD_ROWS
from twostroke.engine.weights import LayerWeights, Weights
from twostroke.errors import ConfigError

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parent.parent / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

GIB = 1 << 30
LLAMA_8B = ModelConfig.from_dicts(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    {},
)
CUDA = EngineOptions(device="cuda")


def refusal(options: EngineOptions, memory: int, config: ModelConfig = LLAMA_8B) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_memory(config, options, device_memory=memory)
    return caught.value


def held(weights: Weights) -> int:
    """Bytes of all tensors, as they lie on a GPU: nothing packed, what is shared once."""

    def tensors(linear: Linear) -> list[torch.Tensor]:
        return [linear.weight(), *([] if linear.bias is None else [linear.bias])]

    def of(layer: LayerWeights) -> list[torch.Tensor]:
        norms = [layer.attention_norm, layer.mlp_norm, layer.qk_norm, layer.attention_post_norm, layer.mlp_post_norm]
        matrices = [tensor for m in (layer.qkv, layer.o, layer.gate_up, layer.down) for tensor in tensors(m)]
        return [*matrices, *(norm for norm in norms if norm is not None)]

    every = [weights.embedding, weights.norm, *(tensor for layer in weights.layers for tensor in of(layer))]
    return sum(tensor.nbytes for tensor in every)


@pytest.mark.parametrize("name", sorted(tiny_models.MODELS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_counted_to_the_byte(name, dtype, tmp_path):
    path = tiny_models.make_config(tmp_path, name)
    config = ModelConfig.from_dir(path)
    weights = dummy_weights(config, getattr(torch, dtype))
    head = weights.head.weight().nbytes
    on_gpu = held(weights) + (0 if config.tied else head)
    assert footprint.weight_bytes(config, EngineOptions(device="cuda", dtype=dtype)) == on_gpu
    assert footprint.weight_bytes(config, EngineOptions(dtype=dtype)) == held(weights) + head


def test_an_8b_model_on_an_h200():
    plan = plan_memory(LLAMA_8B, CUDA, device_memory=140 * GIB)
    assert plan.limit == 126 * GIB
    assert plan.weights == 8_030_261_248 * 2 + 65 * 4096 * 2  # norms are float32
    assert plan.rotation == 131072 * 128 * 4
    assert plan.kv.token_bytes == 131072
    assert plan.kv.page_size == 64
    assert plan.total <= plan.limit < plan.total + 32 * plan.kv.page_bytes
    assert plan.kv.fits(1024) == plan.kv.usable // 16
    assert plan.kv.fits(1025) == plan.kv.usable // 17
    assert plan.lengths == (1024, 4096, 16384, 131072)
    assert {1, 2, 4, 8, 256} <= set(plan.graph_sizes)
    assert plan.graphs == len(plan.graph_sizes) * footprint.GRAPH_BYTES


@pytest.mark.parametrize("memory", [24, 40, 80, 141, 288])
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("changes", [{}, {"dtype": "float32"}, {"page_size": 128, "max_batch": 1000}])
def test_a_plan_is_never_above_its_limit_and_wastes_less_than_a_page(memory, share, changes):
    options = EngineOptions(device="cuda", gpu_memory=share, max_input=1000, max_output=500, **changes)
    try:
        plan = plan_memory(LLAMA_8B, options, device_memory=memory * GIB)
    except ConfigError as error:
        assert error.field == "gpu_memory"
        return
    assert plan.total <= plan.limit == int(share * memory * GIB)
    assert plan.limit - plan.total < plan.kv.nbytes // plan.kv.pages
    assert plan.kv.fits(1500) >= 1


def test_the_limit_is_a_share_or_bytes():
    assert memory_limit(0.5, 100) == 50
    assert memory_limit(1.0, 100) == 100
    assert memory_limit(60 * GIB, 80 * GIB) == 60 * GIB
    with pytest.raises(ConfigError, match=r"the device has 80\.00 GiB") as caught:
        memory_limit(81 * GIB, 80 * GIB)
    assert caught.value.field == "gpu_memory"
    with pytest.raises(ConfigError, match="not known"):
        memory_limit(0.9, 0)


def test_what_holds_no_longest_sequence_is_refused_with_the_remedy():
    error = refusal(CUDA, 24 * GIB)
    assert error.field == "gpu_memory"
    assert "one sequence of 131072 tokens takes 16.01" in error.message
    assert "Raise it" not in error.message  # the device has not so much
    assert "--max-input" in error.message
    bounded = replace(CUDA, max_input=4096, max_output=1024)
    assert longest(LLAMA_8B, bounded) == 5120
    assert longest(LLAMA_8B, replace(CUDA, max_input=4096)) == 131072
    assert plan_memory(LLAMA_8B, bounded, device_memory=24 * GIB).kv.fits(5120) >= 1


def test_the_limit_that_a_refusal_names_is_the_least_that_works():
    error = refusal(replace(CUDA, gpu_memory=0.2), 80 * GIB)
    named = float(error.message.partition("Raise it to ")[2].split()[0])
    assert named == pytest.approx(33.93, abs=0.1)
    plan = plan_memory(LLAMA_8B, replace(CUDA, gpu_memory=(named + 0.01) * GIB), device_memory=80 * GIB)
    assert plan.kv.fits(131072) == 1
    refusal(replace(CUDA, gpu_memory=(named - 0.01) * GIB), 80 * GIB)


def test_a_pool_of_a_size_of_ones_own():
    plan = plan_memory(LLAMA_8B, replace(CUDA, kv_memory=GIB), device_memory=80 * GIB)
    assert plan.kv.nbytes == GIB
    assert plan.total < plan.limit
    error = refusal(replace(CUDA, kv_memory=70 * GIB), 80 * GIB)
    assert error.field == "gpu_memory"
    assert "kv_memory asks for 70.00" in error.message
    assert refusal(replace(CUDA, kv_memory=1 << 20), 80 * GIB).field == "kv_memory"


def test_a_cpu_is_told_not_bounded():
    options = EngineOptions(kv_memory=GIB)
    plan = plan_memory(LLAMA_8B, options)
    assert plan.limit == plan.graphs == plan.context == plan.rotation == 0
    assert plan.kv.nbytes <= GIB < plan.kv.nbytes + 32 * plan.kv.page_bytes
    assert refusal(EngineOptions(kv_memory=1 << 20), 0).field == "kv_memory"


def test_no_graphs_where_none_are_wanted():
    assert footprint.graph_sizes(replace(CUDA, cuda_graphs=False)) == ()
    assert footprint.graph_sizes(replace(CUDA, max_batch=1)) == (1,)
    assert footprint.graph_sizes(replace(CUDA, max_batch=100))[-2:] == (96, 100)
    for most in range(1, 600):
        sizes = footprint.graph_sizes(replace(CUDA, max_batch=most))
        assert sizes[-1] == most
        assert sorted(set(sizes)) == list(sizes)


def test_the_workspace_is_the_sum_of_its_buffers():
    buffers = footprint.workspace(LLAMA_8B, CUDA)
    assert buffers["hidden"] == 8448 * 4096 * 4
    assert buffers["qkv"] == 8448 * 48 * 128 * 2
    assert buffers["gate_up"] == 8448 * 2 * 14336 * 2
    assert buffers["logits"] == 256 * 128256 * 2
    assert buffers["block_tables"] == 513 * 2049 * 4
    assert footprint.workspace_bytes(LLAMA_8B, CUDA) == sum(buffers.values())


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gpus_buffers_are_what_is_planned(name, dtype, tmp_path):
    config = ModelConfig.from_dir(tiny_models.make_config(tmp_path, name))
    options = EngineOptions(device="cuda", dtype=dtype, token_budget=300, max_batch=20)
    planned = footprint.workspace(config, options)
    cpu = torch.device("cpu")
    buffers = Buffers(config, options, getattr(torch, dtype), cpu)
    names = ("hidden", "normed", "qkv", "attended", "projected", "gate_up", "activated", "logits")
    assert buffers.nbytes == sum(planned[name] for name in names)
    pages = -(-config.context_length // options.page_size) + 1
    assert DeviceState(options.max_batch, pages, cpu).tables.nbytes == planned["block_tables"]
    assert footprint.HEAD_ROWS == HEAD_ROWS


def planned() -> MemoryPlan:
    return plan_memory(LLAMA_8B, CUDA, device_memory=140 * GIB)


def test_what_parts_took_stands_beside_what_was_planned():
    plan = planned()
    assert plan.exceeded() == {}
    assert "measured" not in plan.lines()[0]
    measured = plan.with_measured(graphs=GIB, weights=plan.weights).with_measured(context=5)
    assert measured.exceeded() == {"graphs": GIB - plan.graphs}
    assert measured.measured == {"graphs": GIB, "weights": plan.weights, "context": 5}
    assert any(line.startswith("graphs") and line.endswith("1.00") for line in measured.lines())
    with pytest.raises(ValueError, match="no part of the plan: cushions"):
        plan.with_measured(cushions=1)


def test_a_plan_as_json_and_as_a_table():
    plan = planned()
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["bytes"]["total"] == plan.total
    assert told["kv"]["token_bytes"] == 131072
    assert told["sequences"]["131072"] == plan.kv.fits(131072)
    text = "\n".join(plan.lines())
    for words in ("weights", "KV pool, bfloat16", "limit, of 140.00 GiB", "131,072 bytes a token", "of 16,384"):
        assert words in text


def test_planning_imports_no_torch():
    code = "import sys, twostroke.engine.memory_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
