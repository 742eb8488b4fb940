"""Sections of the experiment, with settings and the systems that run on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.paper.arithmetic import Answer, baselines, streams
from benchmarks.paper.case import EAGLE3, OFF, Setting

PRICE = "price"
STATIC = {OFF: "off", **{f"fixed:{k}": f"fixed:{k}" for k in (1, 2, 3, 5)}, "schedule": "schedule"}
ABLATION = {
    OFF: "off",
    "VSD, fixed 5": "fixed:5",
    "schedule (AdaSpec-like)": "schedule",
    "gp_lcb (FASER's own drafter)": "gp_lcb",
    "+ adaptive (price)": "price:mode=serial,prune=off",
    "+ early exit": "price:mode=serial,prune=on",
    "+ early exit where it pays": "price:mode=serial,prune=auto",
    "+ overlap": "price:mode=auto,prune=auto",
}
STREAMS = {
    PRICE: "price:mode=serial,prune=off",
    "ping_pong": "price:mode=ping_pong,prune=off",
    "draft_ahead": "price:mode=draft_ahead,prune=off",
}
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEEDS = (0, 1, 2)
H100_8B = Setting("h100", "llama-3.1-8b", "llama-3.2-1b", 64)


@dataclass(frozen=True)
class Section:
    """A section. base: the system that others are compared with."""

    name: str
    title: str
    settings: tuple[Setting, ...]
    systems: Mapping[str, str]
    base: str = OFF
    max_draft_len: int = 8


def _at(setting: Setting, loads: tuple[int, ...]) -> tuple[Setting, ...]:
    return tuple(replace(setting, load=load) for load in loads)


_PAIRS = (
    *_at(H100_8B, (16, 64, 256)),
    Setting("h100", "qwen3-32b", "qwen3-0.6b", 64),
    Setting("h100", "llama-3.3-70b", "llama-3.2-1b", 64, num_gpus=4),
)
SECTIONS = {
    section.name: section
    for section in (
        Section(
            "static",
            "price against every static setting",
            (
                *(
                    replace(setting, gpu=gpu, seed=seed)
                    for seed in SEEDS
                    for gpu in ("h100", "h200")
                    for setting in _at(H100_8B, LOADS)
                ),
                *(replace(H100_8B, gpu=gpu, load=0, requests_per_s=6.0) for gpu in ("h100", "h200")),
            ),
            STATIC | {PRICE: "price:mode=serial,prune=off"},
        ),
        Section(
            "ablation",
            "the paper's ablation",
            _PAIRS,
            ABLATION,
            base="VSD, fixed 5",
        ),
        Section(
            "adaptive",
            "adaptive verification against a fixed length of 7",
            _at(replace(H100_8B, draft=EAGLE3, acceptance=0.6), (4, 8, 16, 32, 64, 128, 256)),
            {OFF: "off", "fixed:7": "fixed:7", PRICE: "price:mode=serial,prune=off"},
            base="fixed:7",
            max_draft_len=7,
        ),
        Section(
            "overlap",
            "overlap by the SMs that draft",
            tuple(
                replace(H100_8B, load=load, acceptance=acceptance, draft_sms=sms)
                for load in (16, 256)
                for acceptance in (0.7, 0.88)
                for sms in (16, 32)
            ),
            STREAMS,
            base=PRICE,
        ),
        Section(
            "context",
            "long context and prompts",
            tuple(
                replace(H100_8B, load=load, prompt_len=prompt_len, output_len=output_len)
                for load in (8, 32)
                for prompt_len, output_len in ((256, 1000), (4000, 256), (4000, 1000))
            ),
            {OFF: "off", "fixed:3": "fixed:3", PRICE: "price:mode=serial,prune=off"},
        ),
    )
}


@dataclass(frozen=True)
class Question:
    """A question that is answered by arithmetic, without a simulation."""

    name: str
    title: str
    settings: tuple[Setting, ...]
    answers: Callable[[Iterable[Setting]], Iterator[Answer]]


QUESTIONS = {
    question.name: question
    for question in (
        Question("baselines", "trees and several drafters", _PAIRS, baselines),
        Question(
            "sharing",
            "what shares the GPU between two streams",
            tuple(
                replace(setting, load=load, acceptance=acceptance)
                for setting in (
                    H100_8B,
                    replace(H100_8B, draft=EAGLE3),
                    Setting("h100", "qwen3-32b", "qwen3-0.6b", 64),
                    replace(H100_8B, gpu="h200"),
                    replace(H100_8B, gpu="b200"),
                )
                for acceptance in (0.7, 0.85)
                for load in (4, 16, 64, 256)
            ),
            streams,
        ),
    )
}
