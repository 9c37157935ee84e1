"""Frequencies of every kind of rotation against transformers' own functions."""

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twostroke.engine.config_fields import Fields
from twostroke.engine.rope_config import read_rope
from twostroke.engine.rope_scaling import frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "low_freq_factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 8, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7,
     "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.7},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1_000_000},
    {"rope_type": "dynamic", "factor": 4.0},
]  # fmt: skip


@pytest.mark.parametrize("rope", CASES)
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (500_000.0, 128), (1_000_000.0, 80)])
def test_equals_transformers(rope, theta, head_dim):
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters={**rope, "rope_theta": theta}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    ours = read_rope(Fields(rope), Fields({}), theta=theta, head_dim=head_dim, context=131072, partial=False)
    assert torch.equal(frequencies(ours), expected)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("context", [4096, 131072])
def test_longrope_is_that_of_short_sequences(share, context):
    count = int(96 * share) // 2
    rope = {"short_factor": [1 + i / 7 for i in range(count)], "long_factor": [2.0 + i for i in range(count)]}
    fields = {"original_max_position_embeddings": 4096, "partial_rotary_factor": share}
    config = Phi3Config(
        hidden_size=384,
        num_attention_heads=4,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **rope},
        **fields,
    )
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=4096)
    read = {"type": "longrope", **rope}
    ours = read_rope(Fields(read), Fields(fields), theta=1e4, head_dim=96, context=context, partial=True)
    assert torch.equal(frequencies(ours), expected)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    assert (ours.dim, ours.limit) == (2 * count, 4096)


def test_dynamic_is_plain_within_its_limit():
    fields = Fields({"type": "dynamic", "factor": 4.0})
    ours = read_rope(fields, Fields({}), theta=1e4, head_dim=64, context=2048, partial=False)
    plain = read_rope(Fields({}), Fields({}), theta=1e4, head_dim=64, context=2048, partial=False)
    assert torch.equal(frequencies(ours), frequencies(plain))
    assert (ours.limit, plain.limit) == (2048, 0)
