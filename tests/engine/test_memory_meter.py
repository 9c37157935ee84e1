import logging
from dataclasses import replace

import pytest
import torch

from twostroke.engine.memory_meter import SLACK, MemoryMeter
from twostroke.engine.memory_plan import MemoryPlan

from .test_memory_plan import planned


@pytest.fixture
def plan() -> MemoryPlan:
    return planned()


def test_a_cpu_is_not_measured(plan):
    meter = MemoryMeter("cpu")
    with meter.part("weights"):
        pass
    assert meter.taken == {}
    assert meter.beside(plan) == plan


def test_what_takes_more_than_planned_is_told(plan, caplog):
    meter = MemoryMeter("cpu")
    meter.taken = {
        "graphs": plan.graphs + SLACK + 1,
        "weights": plan.weights + SLACK,  # an allocator's rounding
        "workspace": plan.workspace + plan.rotation,
    }
    with caplog.at_level(logging.WARNING):
        measured = meter.beside(plan)
    assert [record.args[0] for record in caplog.records] == ["graphs"]
    assert measured.measured["workspace"] == plan.workspace
    assert measured.measured["rotation"] == plan.rotation
    assert replace(measured, measured={}) == plan


@pytest.mark.gpu
def test_a_gpu_is_measured():
    meter = MemoryMeter("cuda")
    with meter.part("weights"):
        kept = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda")  # not kept
    with meter.part("weights"):
        more = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    assert meter.taken["weights"] == pytest.approx(kept.nbytes + more.nbytes, rel=0.05)
