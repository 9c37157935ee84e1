import math
from dataclasses import replace

import pytest

from twostroke.engine.config import EngineOptions
from twostroke.engine.memory import plan_kv
from twostroke.engine.model_config import ModelConfig
from twostroke.errors import ConfigError

CONFIG = ModelConfig.from_dicts(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    {},
)


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_the_pool_fills_the_memory_and_not_more(dtype, item, page_size):
    options = EngineOptions(dtype=dtype, page_size=page_size, kv_memory=1 << 30)
    plan = plan_kv(CONFIG, options)
    assert plan.page_bytes == 2 * 3 * page_size * 64 * item
    assert plan.shape == (30, plan.pages, 2, 3, page_size, 64)
    assert plan.nbytes == math.prod(plan.shape) * item == plan.pages * plan.page_bytes * 30
    assert plan.nbytes <= 1 << 30 < plan.nbytes + 30 * plan.page_bytes
    assert (plan.dtype, plan.page_size) == (dtype, page_size)


def test_the_embedded_model_takes_23040_bytes_a_token():
    plan = plan_kv(CONFIG, EngineOptions(page_size=16))
    assert plan.nbytes // (plan.pages * 16) == 23_040


def test_too_little_memory_names_the_least_that_works():
    options = EngineOptions(page_size=16, kv_memory=1000)
    with pytest.raises(ConfigError, match="kv_memory is 1000 bytes") as caught:
        plan_kv(CONFIG, options)
    assert caught.value.field == "kv_memory"
    least = 17 * 16 * 23_040
    assert str(least) in caught.value.message
    assert plan_kv(CONFIG, replace(options, kv_memory=least)).pages == 17
    with pytest.raises(ConfigError):
        plan_kv(CONFIG, replace(options, kv_memory=least - 1))


def test_a_model_of_short_context_needs_less():
    short = replace(CONFIG, context_length=20)
    assert plan_kv(short, EngineOptions(page_size=16, kv_memory=3 * 16 * 23_040)).pages == 3
