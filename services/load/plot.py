"""Draws a sweep: what more requests at once buy in throughput, and what they cost each of them."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from .report import Result
from .statistics import Sample


def check_plotting() -> None:
    """ConfigError, with the remedy, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot: needs matplotlib, which is not here: pip install 'twostroke[bench]'", field="plot")


def plot_sweep(results: Sequence[Result], path: Path, title: str) -> None:
    """Writes an image of the kind that the file's name says. ConfigError where it cannot be written."""
    from matplotlib.figure import Figure  # its object interface: no display, no state

    results = sorted(results, key=lambda result: int(result.point["concurrency"]))
    concurrency = [int(result.point["concurrency"]) for result in results]
    figure = Figure(figsize=(8, 9), layout="constrained")
    throughput, latency = figure.subplots(2, 1, sharex=True)
    out = [result.tally.a_second(result.tally.output_tokens) for result in results]
    throughput.plot(concurrency, out, marker="o")
    throughput.set(title=title, ylabel="output tokens/s, all requests", ylim=(0, None))
    measures = (("time to first token", "ttft", "C0"), ("gap01", "gap01", "C1"), ("TPOT", "tpot", "C2"))
    for name, attribute, colour in measures:
        for percent, style in ((50, "-"), (99, ":")):
            samples: list[Sample] = [getattr(result.tally, attribute) for result in results]
            values = [sample.percentile(percent) for sample in samples]
            drawn = [float("nan") if value is None else value * 1e3 for value in values]
            latency.plot(concurrency, drawn, colour, marker="o", linestyle=style, label=f"{name} p{percent}")
    latency.set(xlabel="requests at once", ylabel="ms", yscale="log")
    latency.set_xscale("log", base=2)
    latency.set_xticks(concurrency, [str(each) for each in concurrency])
    latency.legend()
    for axes in (throughput, latency):
        axes.grid(visible=True, alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: cannot write {path}: {error}", field="plot") from error
