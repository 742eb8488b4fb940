"""Plots of the experiment: loads, ablation, and ways to share the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.arithmetic import Answer
from benchmarks.paper.case import Result
from benchmarks.paper.markdown import over_base
from benchmarks.paper.sections import PRICE, SECTIONS

VLLM_ADAPTIVE = {4: 0.93, 8: 0.92, 16: 0.95, 32: 0.95, 64: 1.06, 128: 1.18, 256: 1.70}  # pull request 52362, MI355X


def write_plots(results: Sequence[Result], answers: Mapping[str, Sequence[Answer]], folder: Path) -> bool:
    """Write a PNG for each section that has results; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    by_section = {name: [r for r in results if r.section == name] for name in SECTIONS}
    drawn: dict[str, tuple[Callable[[Sequence[Any], Any], None], Sequence[Any], int]] = {
        "static": (_static, by_section["static"], 2),
        "ablation": (_ablation, by_section["ablation"], 1),
        "adaptive": (_adaptive, by_section["adaptive"], 1),
        "context": (_context, by_section["context"], 1),
        "baselines": (_baselines, answers.get("baselines", ()), 1),
        "sharing": (_sharing, answers.get("sharing", ()), 2),
    }
    for name, (draw, found, columns) in drawn.items():
        if not found:
            continue
        figure = Figure(figsize=(4.6 * columns + 1.6 * (columns == 1), 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots(1, columns, squeeze=False)[0], found)
        figure.suptitle("modeled times, nothing ran on a GPU", fontsize=8, color="0.4")
        figure.savefig(folder / f"{name}.png", dpi=90)
    return True


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _loads(axis: Any, title: str, ylabel: str) -> None:
    axis.set_xscale("log", base=2)
    loads = sorted({int(x) for line in axis.get_lines() for x in line.get_xdata()})
    axis.set_xticks(loads, [str(load) for load in loads])
    axis.minorticks_off()
    axis.axhline(1.0, color="0.6", linewidth=0.8)
    axis.set(title=title, xlabel="requests in flight", ylabel=ylabel)
    axis.legend(fontsize=7)


def _static(axes: Sequence[Any], results: Sequence[Result]) -> None:
    found = over_base(SECTIONS["static"], results)
    for axis, gpu in zip(axes, ("h100", "h200"), strict=True):
        closed = {setting.load: ratios for setting, ratios in found.items() if setting.gpu == gpu and setting.load}
        for system in SECTIONS["static"].systems:
            width = 2.2 if system == PRICE else 1.0
            values = [_mean(ratios[system]) for ratios in closed.values()]
            axis.plot(list(closed), values, marker=".", linewidth=width, label=system)
        _loads(axis, f"{gpu}, 8B + 1B, acceptance 0.7", "tokens per second over off")


def _ablation(axes: Sequence[Any], results: Sequence[Result]) -> None:
    found = over_base(SECTIONS["ablation"], results)
    systems = list(SECTIONS["ablation"].systems)
    for index, (setting, ratios) in enumerate(found.items()):
        places = [place + 0.15 * index for place in range(len(systems))]
        values = [_mean(ratios[system]) for system in systems]
        label = f"{setting.target.split('-')[-1]}, {setting.load} in flight"
        axes[0].barh(places, values, height=0.14, label=label)
    axes[0].set_yticks([place + 0.3 for place in range(len(systems))], systems, fontsize=7)
    axes[0].invert_yaxis()
    axes[0].axvline(1.0, color="0.6", linewidth=0.8)
    axes[0].set(xlabel="tokens per second over a fixed length of 5", xlim=(0.5, 1.8))
    axes[0].legend(fontsize=6)


def _adaptive(axes: Sequence[Any], results: Sequence[Result]) -> None:
    found = {setting.load: ratios for setting, ratios in over_base(SECTIONS["adaptive"], results).items()}
    axes[0].plot(list(found), [_mean(r[PRICE]) for r in found.values()], marker=".", label="price, modeled H100")
    axes[0].plot(list(found), [_mean(r["off"]) for r in found.values()], marker=".", label="off, modeled H100")
    vllm = {load: ratio for load, ratio in VLLM_ADAPTIVE.items() if load in found}
    axes[0].plot(list(vllm), list(vllm.values()), marker="x", linestyle=":", label="vLLM's, measured on an MI355X")
    _loads(axes[0], "8B + EAGLE-3 head, acceptance 0.6", "over a fixed length of 7")


def _context(axes: Sequence[Any], results: Sequence[Result]) -> None:
    found = over_base(SECTIONS["context"], results)
    labels = [f"{s.prompt_len} in, {s.output_len} out\n{s.load} in flight" for s in found]
    for index, system in enumerate((PRICE, "fixed:3")):
        places = [place + 0.36 * index for place in range(len(found))]
        axes[0].bar(places, [_mean(ratios[system]) for ratios in found.values()], width=0.34, label=system)
    axes[0].set_xticks([place + 0.18 for place in range(len(found))], labels, fontsize=6)
    axes[0].axhline(1.0, color="0.6", linewidth=0.8)
    axes[0].set(ylabel="tokens per second over off", ylim=(0.8, None), title="H100, 8B + 1B")
    axes[0].legend(fontsize=7)


def _baselines(axes: Sequence[Any], answers: Sequence[Answer]) -> None:
    systems = [system for system in answers[0].rates if system != answers[0].base]
    for index, answer in enumerate(answers):
        places = [place + 0.15 * index for place in range(len(systems))]
        label = f"{answer.setting.target.split('-')[-1]}, {answer.setting.load} in flight"
        axes[0].barh(places, [answer.ratios[system] for system in systems], height=0.14, label=label)
    axes[0].set_yticks([place + 0.3 for place in range(len(systems))], systems, fontsize=7)
    axes[0].invert_yaxis()
    axes[0].axvline(1.0, color="0.6", linewidth=0.8)
    axes[0].set(xlabel=f"tokens per ms over a {answers[0].base}, by arithmetic", xlim=(0.0, 2.2))
    axes[0].legend(fontsize=6)


def _sharing(axes: Sequence[Any], answers: Sequence[Answer]) -> None:
    for axis, gpu in zip(axes, ("h100", "h200"), strict=True):
        shown = [a for a in answers if a.setting.gpu == gpu and a.setting.acceptance == 0.85]
        shown = [a for a in shown if a.setting.pair == shown[0].setting.pair]
        for system in (name for name in shown[0].rates if name != shown[0].base):
            axis.plot([a.setting.load for a in shown], [a.ratios[system] for a in shown], marker=".", label=system)
        _loads(axis, f"{gpu}, 8B + 1B, acceptance 0.85", "over serial steps, by arithmetic")
