"""Draw the plots of docs/results.md into docs/figures, from the numbers of that page's runs.

python -m benchmarks.figures
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
SMALL = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "faser", "axes.spines.top": False} | {
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}

# Tokens per second over `off`, by requests in flight: `faser bench gpu`, 2026-11-26.
GPU_GAIN: dict[str, tuple[tuple[int, ...], dict[str, tuple[float, ...]]]] = {
    "H100, commit fc2fd87": (
        (4, 16, 64),
        {
            "fixed:2": (1.73, 1.60, 1.32),
            "fixed:4": (1.94, 1.81, 1.27),
            "price, hand-made cost table": (1.93, 1.65, 1.26),
        },
    ),
    "H200, commit a205784, vocabulary 128,256": (
        (1, 16, 64, 256),
        {
            "fixed:2": (1.51, 1.29, 1.10, 0.95),
            "fixed:4": (1.54, 1.26, 1.03, 0.88),
            "price, its own cost table": (1.71, 1.24, 1.06, 0.92),
        },
    ),
}
# Tokens per second by batch size 1, 4 and 8, demo pair, 8 layers: `faser bench peers`, commit 3e763b5.
BATCHES = (1, 4, 8)
TOKENS_PER_S = {
    "transformers generate": (150, 491, 864),
    "llama.cpp bf16": (1031, 1814, 2088),
    "ours, bf16, no speculation": (1311, 4175, 6057),
    "ours, bf16, best fixed length": (3725, 6974, 10468),
}
# Time of the faster of llama.cpp and OpenVINO over ours, 431M weights, by rows: `faser bench peers.bits`.
ROWS = (1, 4, 8, 16, 64)
PEERS_TIME = {
    "bf16": (1.35, 1.27, 1.26, 1.16, 1.03),
    "W8A8": (1.50, 1.63, 1.69, 1.76, 1.47),
    "W4A8": (1.65, 1.92, 2.05, 1.82, 1.18),
}
# CPU us per streamed response and responses per second: `faser bench edge`, commit 1886dbc.
RESPONSE_US = {
    "64 streams, 0 ms\n22,640/s": (28, 34),
    "256 streams, 0 ms\n19,638/s": (35, 39),
    "64 streams, 2 ms\n15,379/s": (34, 42),
    "256 streams, 10 ms\n11,327/s": (43, 47),
    "64 streams, 10 ms\n5,030/s": (43, 53),
}


def main() -> None:
    """Write the three plots."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    FOLDER.mkdir(exist_ok=True)
    with plt.rc_context(SMALL):
        for name, draw, size in (
            ("gpu_gain", _gpu_gain, (8, 3)),
            ("cpu_peers", _cpu_peers, (8, 3.2)),
            ("response_cost", _response_cost, (7, 2.6)),
        ):
            figure = plt.figure(figsize=size, layout="constrained")
            draw(figure)
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


def _gpu_gain(figure: Any) -> None:
    for axes, (title, (requests, systems)) in zip(figure.subplots(1, 2, sharey=True), GPU_GAIN.items(), strict=True):
        for label, ratios in systems.items():
            axes.plot(requests, ratios, marker="o", label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        _log_ticks(axes, requests)
        axes.set(title=title, xlabel="requests in flight", ylabel="tokens/s over no speculation")
        axes.legend(framealpha=1, edgecolor="white")


def _cpu_peers(figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for index, (label, rates) in enumerate(TOKENS_PER_S.items()):
        left.bar([place + 0.2 * index for place in range(len(BATCHES))], rates, 0.2, label=label)
    left.set_xticks([place + 0.3 for place in range(len(BATCHES))], list(map(str, BATCHES)))
    left.set(title="demo pair, two cores of a Xeon", xlabel="batch size", ylabel="tokens/s")
    left.legend(frameon=False)
    for label, ratios in PEERS_TIME.items():
        right.plot(ROWS, ratios, marker="o", label=label)
    right.axhline(1, color="black", linewidth=0.8)
    _log_ticks(right, ROWS)
    right.set(title="431M weights, one thread", xlabel="rows in a pass", ylabel="faster peer's time over ours")
    right.legend(frameon=False)


def _response_cost(figure: Any) -> None:
    axes = figure.subplots()
    server, engine = zip(*RESPONSE_US.values(), strict=True)
    names = list(RESPONSE_US)
    axes.barh(names, server, label="tritonserver")
    axes.barh(names, engine, left=server, label="engine process")
    axes.invert_yaxis()
    axes.set(xlabel="CPU us per response", ylabel="streams, time between steps,\nresponses per second")
    axes.legend(frameon=False)


def _log_ticks(axes: Any, places: tuple[int, ...]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, list(map(str, places)))


if __name__ == "__main__":
    main()
