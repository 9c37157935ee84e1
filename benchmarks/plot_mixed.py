"""Draws the sweep of benchmarks/gpu_mixed.py: `python benchmarks/plot_mixed.py [FILE.jsonl] [PICTURE.png]`.

Without a file, the committed results; without a picture, docs/mixed.png. Needs matplotlib, and no GPU.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import load

PICTURE = Path(__file__).parent.parent / "docs" / "mixed.png"
GROUP = ("gpu", "cpu", "model", "dtype", "decoding", "context", "prompt", "rate")
Line = Mapping[str, Any]


def newest_sweep(lines: Sequence[Line]) -> list[Line]:
    """The lines of the newest sweep, one a token budget, in their order. ValueError without any."""
    mixed = sorted((line for line in lines if line["bench"] == "mixed"), key=lambda line: str(line["date"]))
    if not mixed:
        raise ValueError("no `mixed` line: run benchmarks/gpu_mixed.py first")
    newest = [mixed[-1].get(key) for key in GROUP]
    by_budget = {line["token_budget"]: line for line in mixed if [line.get(key) for key in GROUP] == newest}
    return [by_budget[budget] for budget in sorted(by_budget)]


def draw(lines: Sequence[Line], path: Path) -> None:
    """Gaps between tokens, time to first token and prefill rate over the token budget."""
    from matplotlib.figure import Figure  # its object interface: no display, no state

    budgets = [line["token_budget"] for line in lines]
    first = lines[0]
    figure = Figure(figsize=(8, 9), layout="constrained")
    gaps, waits = figure.subplots(2, 1, sharex=True)
    quiet = [line["figures"]["quiet_itl_p50"] for line in lines]
    gaps.plot(budgets, [line["value"] for line in lines], "C0", marker="o", label="ITL p50")
    gaps.plot(budgets, [line["p99"] for line in lines], "C0", marker="o", linestyle=":", label="ITL p99")
    gaps.plot(budgets, quiet, "C7", linestyle="--", label="ITL p50 without prompts")
    machine = first.get("gpu") or first.get("cpu")
    gaps.set(
        title=f"{first['decoding']} sequences decode, {first['rate']:g} prompts/s of {first['prompt']} tokens arrive\n"
        f"{first['model']}, {first['dtype']}, {machine}",
        ylabel="ms between tokens",
        ylim=(0, None),
    )
    waits.plot(budgets, [line["figures"]["ttft_p50"] for line in lines], "C1", marker="o", label="TTFT p50")
    waits.plot(
        budgets, [line["figures"]["ttft_p99"] for line in lines], "C1", marker="o", linestyle=":", label="TTFT p99"
    )
    waits.set(xlabel="token budget of a step", ylabel="ms to the first token", ylim=(0, None))
    waits.set_xscale("log", base=2)
    waits.set_xticks(budgets, [str(budget) for budget in budgets])
    rates = waits.twinx()
    rates.plot(budgets, [line["figures"]["prefill_tokens_s"] for line in lines], "C2", marker="s", label="prefill")
    rates.set(ylabel="prompt tokens/s (green)", ylim=(0, None))
    gaps.legend()
    waits.legend()
    for axes in (gaps, waits):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Reads, draws."""
    source, picture = ([*sys.argv[1:], "", ""])[:2]
    lines = [json.loads(text) for text in Path(source).read_text().splitlines()] if source else load()
    draw(newest_sweep(lines), Path(picture) if picture else PICTURE)


if __name__ == "__main__":
    main()
