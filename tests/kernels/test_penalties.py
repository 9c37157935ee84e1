"""Penalties against their definitions, written plainly in numpy."""

import numpy as np
import torch

from twostroke.kernels.penalties import penalize_


def plainly(
    row: np.ndarray, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> np.ndarray:
    """Token by token, in float32."""
    result = row.copy()
    r, p, f = np.float32(repetition), np.float32(presence), np.float32(frequency)
    for token in range(len(row)):
        count = output.count(token)
        if count or token in prompt:
            result[token] = result[token] / r if result[token] > 0 else result[token] * r
        if count:
            result[token] -= p
            result[token] -= f * np.float32(count)
    return result


def entries(prompts: list[list[int]], outputs: list[list[int]]) -> tuple[torch.Tensor, ...]:
    rows, ids, counts = [], [], []
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for token in dict.fromkeys([*prompt, *output]):
            rows.append(row)
            ids.append(token)
            counts.append(output.count(token))
    return torch.tensor(rows), torch.tensor(ids), torch.tensor(counts)


def test_each_row_by_its_own_history() -> None:
    generator = np.random.default_rng(0)
    vocab, size = 83, 9
    logits = (generator.normal(size=(size, vocab)) * 3).astype(np.float32)
    logits[3, 5], logits[4, 6] = 0.0, -np.inf
    prompts = [generator.integers(0, vocab, generator.integers(0, 40)).tolist() for _ in range(size)]
    outputs = [generator.integers(0, vocab // 4, generator.integers(0, 60)).tolist() for _ in range(size)]
    prompts[3], outputs[4] = [5, 7], [6, 6, 6]
    repetition = generator.uniform(0.3, 3, size).tolist()
    presence, frequency = generator.uniform(-2, 2, (2, size)).tolist()
    repetition[1], presence[1], frequency[1] = 1.0, 0.0, 0.0
    result = torch.from_numpy(logits.copy())
    penalize_(
        result,
        *entries(prompts, outputs),
        repetition=torch.tensor(repetition),
        presence=torch.tensor(presence),
        frequency=torch.tensor(frequency),
    )
    for i in range(size):
        expected = plainly(logits[i], prompts[i], outputs[i], repetition[i], presence[i], frequency[i])
        np.testing.assert_array_equal(result[i].numpy(), expected)
    np.testing.assert_array_equal(result[1].numpy(), logits[1])


def test_no_entries_change_nothing() -> None:
    logits = torch.ones(2, 5)
    none, column = torch.empty(0, dtype=torch.int64), torch.full((2,), 2.0)
    penalize_(logits, none, none, none, repetition=column, presence=column, frequency=column)
    assert torch.equal(logits, torch.ones(2, 5))
