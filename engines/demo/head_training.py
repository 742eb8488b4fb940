"""Shared by the training scripts of draft heads: the target, text, the target's own greedy output, and a training loop
that can be stopped at any time."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from train_demo_pair import RMS_NORM_EPS, Llama, Optimizer, Sizes, draw  # noqa: E402

from faser_trtllm.profiling.prompts import HELD_OUT_STRIDE, library_files  # noqa: E402

STEP_WEIGHT = 0.8  # weight of a position's loss relative to that of the position before
PROMPT_LEN, OUTPUT_LEN, NUM_PROMPTS = 64, 80, 24  # of the greedy continuations that measure
TEXT_STRIDE = 4  # between the passes that measure on text


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, RMS_NORM_EPS)


def rotation(sizes: Sizes, length: int) -> tuple[Tensor, Tensor]:
    inv_freq = sizes.rope_theta ** (-torch.arange(0, sizes.head_dim, 2).float() / sizes.head_dim)
    angle = torch.outer(torch.arange(length).float(), inv_freq)
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def load_target(directory: Path) -> Llama:
    config = json.loads((directory / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = Sizes(*(config[name] for name in names), inner=config["intermediate_size"], rope_theta=config["rope_theta"])
    target = Llama(sizes)
    weights = load_file(directory / "model.safetensors")
    state = {"embed.weight": weights["model.embed_tokens.weight"], "norm": weights["model.norm.weight"]}
    for i in range(sizes.layers):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        state[ours + "norm1"] = weights[theirs + "input_layernorm.weight"]
        state[ours + "norm2"] = weights[theirs + "post_attention_layernorm.weight"]
        for name in "qkvo":
            state[f"{ours}{name}.weight"] = weights[f"{theirs}self_attn.{name}_proj.weight"]
        for name in ("gate", "up", "down"):
            state[f"{ours}{name}.weight"] = weights[f"{theirs}mlp.{name}_proj.weight"]
    target.load_state_dict({name: weight.float() for name, weight in state.items()})
    return target.requires_grad_(False)


@torch.no_grad()
def run_target(target: Llama, ids: Tensor, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Hidden rows on entering these layers [batch, length, layers * hidden] of ids [batch, length] (the target's number
    of layers: on leaving the last), and the rows before the LM head."""
    cos, sin = rotation(target.sizes, ids.shape[1])
    x = target.embed(ids)
    seen = [x[..., :0]]
    for layer, block in enumerate(target.blocks):
        if layer in layers:
            seen.append(x)
        x = block(x, cos.to(x.dtype), sin.to(x.dtype))
    if target.sizes.layers in layers:
        seen.append(x)
    return torch.cat(seen, -1).float(), norm(x, target.norm)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """A file that is there is whole."""
    scratch = path.with_suffix(".tmp")
    torch.save(state, scratch)
    os.replace(scratch, path)


def read_text(work: Path, target_dir: Path) -> tuple[Tensor, Tensor]:
    """Return (training ids, held-out ids); taken from `work` if they are there."""
    path = work / "ids.pt"
    if not path.exists():
        tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
        files = library_files(Path(sysconfig.get_paths()["stdlib"]))
        texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
        ids = [torch.tensor([0, *encoding.ids]) for encoding in tokenizer.encode_batch(texts)]
        kept = [part for i, part in enumerate(ids) if i % HELD_OUT_STRIDE]
        write_state(path, {"training": torch.cat(kept), "held_out": torch.cat(ids[::HELD_OUT_STRIDE])})
    ids = torch.load(path, weights_only=True)
    return ids["training"], ids["held_out"]


@torch.no_grad()
def continue_greedily(target: Llama, work: Path, held_out: Tensor) -> Tensor:
    """Held-out prompts with what the target says to them [prompts, prompt and output]; from `work` if it is there."""
    path = work / "greedy.pt"
    if not path.exists():
        ids = draw(held_out, NUM_PROMPTS, PROMPT_LEN)[0]
        for _ in range(OUTPUT_LEN):
            last = run_target(target, ids)[1][:, -1]
            ids = torch.cat([ids, F.linear(last, target.embed.weight).argmax(-1, keepdim=True)], 1)
        write_state(path, {"ids": ids})
    return torch.load(path, weights_only=True)["ids"]


def _kept(proposals: Sequence[Tensor], greedy: Tensor) -> Tensor:
    """1 where the target's greedy choice is the head's at a place and at those before [prompts, rows, places]."""
    first, num_rows = PROMPT_LEN - 2, greedy.shape[1] - len(proposals) - 1  # the last row's furthest draft is in greedy
    hits = [
        found[:, first:num_rows] == greedy[:, first + 2 + place : num_rows + 2 + place]
        for place, found in enumerate(proposals)
    ]
    return torch.stack(hits, -1).float().cumprod(-1)


def acceptance(proposals: Sequence[Tensor], greedy: Tensor) -> list[float]:
    """How often the target's greedy choice is the head's, by place, given the places before, where the target goes on
    by itself. proposals: of each place [prompts, rows]; greedy: as continue_greedily gives it."""
    kept = _kept(proposals, greedy)
    alive = torch.cat([torch.ones_like(kept[..., :1]), kept[..., :-1]], -1)
    return [round(share, 3) for share in (kept.sum((0, 1)) / alive.sum((0, 1)).clamp(min=1)).tolist()]


def tokens_per_pass(proposals: Sequence[Tensor], greedy: Tensor) -> float:
    """Mean of the passes that follow each other from the prompt's end on, the target's own token included."""
    tokens = passes = 0
    for lengths in (_kept(proposals, greedy).sum(-1).int() + 1).tolist():
        row = 0
        while row < len(lengths):
            row, tokens, passes = row + lengths[row], tokens + lengths[row], passes + 1
    return round(tokens / max(passes, 1), 3)


def windows(held_out: Tensor, length: int) -> Tensor:
    """Return 16 windows from all over the held-out text [16, length]."""
    return held_out.unfold(0, length, len(held_out) // 16)[:16]


@torch.no_grad()
def measure(
    logits_of: Callable[[Tensor, Tensor], Iterable[Tensor]],
    num_places: int,
    target: Llama,
    greedy: Tensor,
    text: Tensor,
) -> dict[str, Any]:
    """`acceptance` and `tokens_per_pass`; on_text: tokens of a pass that begins anywhere in text [batch, length], at
    temperature 1.

    logits_of(ids [batch, length], anchors): of each place [batch, anchors, vocab], where a pass begins at these
    positions and its drafts are those of ids up to the place.
    """
    anchors = torch.arange(1, greedy.shape[1] - num_places)
    proposals = [logits.argmax(-1) for logits in logits_of(greedy, anchors)]
    last = run_target(target, text)[1]
    anchors = torch.arange(TEXT_STRIDE, text.shape[1] - num_places, TEXT_STRIDE)
    survival, on_text = torch.ones(()), 1.0
    for place, logits in enumerate(logits_of(text, anchors)):
        probs = F.linear(last[:, anchors + place], target.embed.weight).softmax(-1)
        survival = survival * torch.minimum(probs, logits.softmax(-1)).sum(-1)
        on_text += survival.mean().item()
    return {
        "greedy_by_place": acceptance(proposals, greedy),
        "tokens_per_pass": tokens_per_pass(proposals, greedy),
        "on_text": round(on_text, 3),
    }


class Training:
    """A head's training, for a time that may be spread over several runs."""

    place_weight = STEP_WEIGHT

    def __init__(self, head: Any, target: Llama, work: Path, minutes: float) -> None:
        """head: a module with its matrices in `blocks`, and `save`."""
        self.head, self.target = head, target
        self.optimizer = Optimizer(head, adam_lr=1e-3)  # type: ignore[arg-type]
        self.step, self.num_tokens, self.elapsed_s, self.loss = 0, 0, 0.0, 0.0
        self.curve: list[dict[str, Any]] = []
        self._path, self._total_s = work / "head.pt", minutes * 60

    @property
    def done(self) -> bool:
        return self.elapsed_s >= self._total_s

    def run(self, data: Tensor, batch: int, length: int, save_every_s: float) -> None:
        """Train until the time is over or so long, whatever is first."""
        begin_s = self.elapsed_s
        while not self.done and self.elapsed_s - begin_s < save_every_s:
            start = time.monotonic()
            loss = self._one_step(draw(data, batch, length)[0])
            self.step += 1
            self.num_tokens += batch * length
            self.elapsed_s += time.monotonic() - start
            self.loss = loss if self.step == 1 else self.loss + 0.05 * (loss - self.loss)

    def _one_step(self, ids: Tensor) -> float:
        losses = self.losses(ids)
        sum(self.place_weight**i * loss for i, loss in enumerate(losses)).backward()
        done = self.elapsed_s / self._total_s
        self.optimizer.step(min(1, (self.step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1, done)))))
        return losses[0].item()

    def losses(self, ids: Tensor) -> list[Tensor]:
        """Return the loss of each position; ids: [batch, length]."""
        raise NotImplementedError

    def save(self) -> None:
        write_state(
            self._path,
            {
                "head": self.head.state_dict(),
                "adam": self.optimizer.adam.state_dict(),
                "momentum": self.optimizer.momentum,
                "progress": [self.step, self.num_tokens, self.elapsed_s, self.loss],
                "curve": self.curve,
            },
        )

    def load(self) -> None:
        """Go on from what `save` wrote, if it did."""
        if not self._path.exists():
            return
        state = torch.load(self._path, weights_only=True)
        self.head.load_state_dict(state["head"])
        self.optimizer.adam.load_state_dict(state["adam"])
        self.optimizer.momentum = state["momentum"]
        self.step, self.num_tokens, self.elapsed_s, self.loss = state["progress"]
        self.curve = state["curve"]
        torch.manual_seed(self.step)
        print(f"goes on from step {self.step}", flush=True)


def train(training: Training, data: Tensor, options: argparse.Namespace, found: Callable[[], dict[str, Any]]) -> None:
    """To the end of its time; every few minutes what `found` measures, and a checkpoint."""
    training.load()
    while True:
        start = time.monotonic()
        if not training.curve or training.curve[-1]["step"] < training.step:
            entry = {"step": training.step, "tokens": training.num_tokens, "s": round(training.elapsed_s)}
            training.curve.append(entry | {"loss": round(training.loss, 3)} | found())
            print(json.dumps(training.curve[-1]), flush=True)
            num_bytes = training.head.save(options.out)
            training.elapsed_s += time.monotonic() - start
            training.save()
            metrics = {"bytes": num_bytes, "training_tokens": len(data), "curve": training.curve}
            (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        if training.done:
            break
        training.run(data, options.batch, options.length, options.save_minutes * 60)


def parser_of(description: str | None, minutes: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--minutes", type=float, default=minutes, help="of training, over all runs")
    parser.add_argument("--save-minutes", type=float, default=3, help="between two checkpoints and measurements")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def prepare(options: argparse.Namespace) -> Path:
    """Return OUT/work."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    work: Path = options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    return work
