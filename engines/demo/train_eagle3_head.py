"""Train an EAGLE-3 head (arXiv 2503.01840) for the demo target: an hour of one CPU core, resumable.

Text: the standard library of the running Python, without the files that prompts of benches are drawn from. The loss is
the cross entropy to the target's own distribution, over three steps of training-time test. Needs PyTorch, tokenizers
and safetensors, no network.

    python engines/demo/train_eagle3_head.py --out head --minutes 60     # stopped at any time; the same command goes on

Writes OUT/config.json and OUT/model.safetensors in the published layout, again and again, OUT/metrics.json with the
acceptance measured on the way, and OUT/work, which holds what a later run goes on from and can be deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from train_demo_pair import RMS_NORM_EPS, Llama, Optimizer, Sizes, draw  # noqa: E402

from faser_trtllm.profiling.prompts import HELD_OUT_STRIDE, library_files  # noqa: E402

LAYERS = (2, 5, 8)  # of the target, whose entering hidden rows the head reads; 8: what leaves the last
NUM_STEPS = 3  # of training-time test
STEP_WEIGHT = 0.8  # of a step's loss, beside that of the one before
LATER_ROWS = 0.25  # share of the rows that take the steps behind the first
PROMPT_LEN, OUTPUT_LEN, NUM_PROMPTS, NUM_PLACES = 64, 80, 24, 4  # of the greedy continuations that measure


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
def run_target(target: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Features [batch, length, layers * hidden] of ids [batch, length], and the rows before the LM head."""
    cos, sin = rotation(target.sizes, ids.shape[1])
    x, seen = target.embed(ids), []
    for layer, block in enumerate(target.blocks):
        if layer in LAYERS:
            seen.append(x)
        x = block(x, cos.to(x.dtype), sin.to(x.dtype))
    if target.sizes.layers in LAYERS:
        seen.append(x)
    return torch.cat(seen, -1).float(), norm(x, target.norm)


class HeadLayer(nn.Module):
    def __init__(self, sizes: Sizes, inner: int) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.input_norm, self.hidden_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.fc = nn.Linear(len(LAYERS) * hidden, hidden, bias=False)
        self.q, self.k, self.v = (nn.Linear(2 * hidden, hidden, bias=False) for _ in range(3))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)


class Head(nn.Module):
    """Row t reads the target's hidden rows of position t and the embedding of token t + 1, and predicts token t + 2.

    draft_ids [draft_vocab]: token ids of the outputs. scale [features]: evens out the target's channels while the head
    is trained; `save` folds it into fc."""

    def __init__(self, target: Llama, draft_ids: Tensor, scale: Tensor, inner: int) -> None:
        super().__init__()
        self.sizes, self.inner = target.sizes, inner
        self.blocks = nn.ModuleList([HeadLayer(target.sizes, inner)])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2) if residual else 1))
        self.norm = nn.Parameter(target.norm.clone())
        self.lm_head = nn.Parameter(target.embed.weight[draft_ids].clone())
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("scale", scale)

    def _qkv(self, hidden: Tensor, embedding: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer, sizes = self.blocks[0], self.sizes
        x = torch.cat([norm(embedding, layer.input_norm), norm(hidden, layer.hidden_norm)], -1)

        def split(t: Tensor) -> Tensor:
            return t.view(*t.shape[:2], sizes.heads, sizes.head_dim).transpose(1, 2)

        def rotate(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos.to(t.dtype) + torch.cat([-second, first], -1) * sin.to(t.dtype)

        return rotate(split(layer.q(x))), rotate(split(layer.k(x))), split(layer.v(x))

    def _finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        layer = self.blocks[0]
        hidden = hidden + layer.o(attended.transpose(1, 2).flatten(2))
        x = norm(hidden, layer.post_norm)
        return hidden + layer.down(F.silu(layer.gate(x)) * layer.up(x))

    def forward(self, features: Tensor, embeddings: Tensor, num_steps: int, rows: Tensor) -> list[Tensor]:
        """Logits of each step [batch, rows, draft_vocab]: the first of all rows, length - num_steps of them, those
        behind it of `rows`. A step behind the first reads the head's own output in the features' place; its row sees
        the first step's rows up to its own, and what its own later steps left."""
        num_rows = features.shape[1] - num_steps
        cos, sin = rotation(self.sizes, num_rows + num_steps)
        hidden = self.blocks[0].fc(features[:, :num_rows] * self.scale).float()
        q, k, v = self._qkv(hidden, embeddings[:, 1 : num_rows + 1], cos[:num_rows], sin[:num_rows])
        hidden = self._finish(hidden, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        found = [self._logits(hidden)]
        hidden, own = hidden[:, rows], []
        unseen = torch.arange(num_rows)[None] > rows[:, None]
        for step in range(1, num_steps):
            q, k_own, v_own = self._qkv(hidden, embeddings[:, rows + 1 + step], cos[rows + step], sin[rows + step])
            own.append((k_own, v_own))
            scores = (q @ k.transpose(-1, -2)).float().masked_fill(unseen, -torch.inf)
            of_own = [(q * k_own).sum(-1, keepdim=True).float() for k_own, _ in own]
            law = (torch.cat([scores, *of_own], -1) / math.sqrt(self.sizes.head_dim)).softmax(-1).to(v.dtype)
            attended = law[..., :num_rows] @ v
            for i, (_, v_own) in enumerate(own):
                attended = attended + law[..., num_rows + i, None] * v_own
            hidden = self._finish(hidden, attended)
            found.append(self._logits(hidden))
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(norm(hidden, self.norm), self.lm_head)

    def save(self, directory: Path) -> int:
        """Write the checkpoint in the published layout -> bytes of its tensors' file."""
        layer, sizes = self.blocks[0], self.sizes
        weights = {
            "fc.weight": layer.fc.weight * self.scale,
            "midlayer.input_layernorm.weight": layer.input_norm,
            "midlayer.hidden_norm.weight": layer.hidden_norm,
            "midlayer.post_attention_layernorm.weight": layer.post_norm,
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
        }
        weights |= {f"midlayer.self_attn.{name}_proj.weight": getattr(layer, name).weight for name in "qkvo"}
        weights |= {f"midlayer.mlp.{name}_proj.weight": getattr(layer, name).weight for name in ("gate", "up", "down")}
        tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
        tensors["d2t"] = self.draft_ids - torch.arange(len(self.draft_ids))
        tensors["t2d"] = torch.isin(torch.arange(sizes.vocab), self.draft_ids)
        save_file(tensors, directory / "model.safetensors.tmp", {"format": "pt"})
        os.replace(directory / "model.safetensors.tmp", directory / "model.safetensors")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": sizes.vocab,
            "draft_vocab_size": len(self.draft_ids),
            "hidden_size": sizes.hidden,
            "target_hidden_size": sizes.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.heads,
            "head_dim": sizes.head_dim,
            "rms_norm_eps": RMS_NORM_EPS,
            "rope_theta": sizes.rope_theta,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            "torch_dtype": "bfloat16",
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        return (directory / "model.safetensors").stat().st_size


def write_state(path: Path, state: dict[str, Any]) -> None:
    """A file that is there is whole."""
    scratch = path.with_suffix(".tmp")
    torch.save(state, scratch)
    os.replace(scratch, path)


def read_text(work: Path, target_dir: Path) -> tuple[Tensor, Tensor]:
    """-> (training ids, held-out ids); taken from `work` if they are there."""
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


@torch.no_grad()
def measure(head: Head, target: Llama, greedy: Tensor, text: Tensor) -> dict[str, Any]:
    """How often the target's greedy choice is the head's: by place, given the places before, where the target goes on
    by itself; and at the first place on text [batch, length]."""

    def proposals(ids: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        rows = torch.arange(ids.shape[1] - num_steps)
        return [head.draft_ids[x.argmax(-1)] for x in head(features, target.embed(ids), num_steps, rows)]

    features, _ = run_target(target, greedy)
    first = PROMPT_LEN - 2
    hits = []
    for place, found in enumerate(proposals(greedy, features, NUM_PLACES)):
        num_rows = greedy.shape[1] - NUM_PLACES - 1  # the last row's furthest draft has no token to compare with
        hits.append(found[:, first:num_rows] == greedy[:, first + 2 + place : num_rows + 2 + place])
    run = torch.stack(hits, -1).float().cumprod(-1)
    alive = torch.cat([torch.ones_like(run[..., :1]), run[..., :-1]], -1)
    by_place = (run.sum((0, 1)) / alive.sum((0, 1)).clamp(min=1)).tolist()
    features, last = run_target(target, text)
    choice = F.linear(last, target.embed.weight).argmax(-1)
    on_text = (proposals(text, features, 1)[0] == choice[:, 1:]).float().mean().item()
    return {"greedy_by_place": [round(share, 3) for share in by_place], "on_text": round(on_text, 3)}


class Training:
    """The head's training, for a time that may be spread over several runs."""

    def __init__(self, head: Head, target: Llama, work: Path, minutes: float) -> None:
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
        """-> the first place's loss."""
        num_rows = ids.shape[1] - NUM_STEPS
        rows = torch.randperm(num_rows)[: int(num_rows * LATER_ROWS)].sort().values
        with torch.autocast("cpu", torch.bfloat16):
            features, last = run_target(self.target, ids)
            laws = F.linear(last, self.target.embed.weight[self.head.draft_ids]).float().softmax(-1)
            found = self.head(features, self.target.embed(ids), NUM_STEPS, rows)
        losses = []
        for step, logits in enumerate(found):
            law = laws[:, (torch.arange(num_rows) if step == 0 else rows) + 1 + step]
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), law.flatten(0, 1)))
        sum(STEP_WEIGHT**i * loss for i, loss in enumerate(losses)).backward()
        done = self.elapsed_s / self._total_s
        self.optimizer.step(min(1, (self.step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1, done)))))
        return losses[0].item()

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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("eagle3"))
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--minutes", type=float, default=60, help="of training, over all runs")
    parser.add_argument("--save-minutes", type=float, default=3, help="between two checkpoints and measurements")
    parser.add_argument("--draft-vocab", type=int, default=1536)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    work = options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    training_ids, held_out = read_text(work, options.target)
    target = load_target(options.target)
    counts = torch.bincount(training_ids, minlength=target.sizes.vocab)
    draft_ids = counts.topk(options.draft_vocab).indices.sort().values
    sample = run_target(target, draw(training_ids, options.batch, options.length)[0])[0]
    head = Head(target, draft_ids, sample.square().mean((0, 1)).rsqrt(), options.inner)
    greedy = continue_greedily(target, work, held_out)
    text = held_out.unfold(0, options.length, len(held_out) // 16)[:16]
    drafted = torch.isin(greedy[:, PROMPT_LEN:], draft_ids).float().mean()
    print(
        f"{len(training_ids) / 1e6:.2f}M training tokens; in the draft vocabulary are "
        f"{counts[draft_ids].sum() / counts.sum():.3f} of them and {drafted:.3f} of the target's own",
        flush=True,
    )
    training = Training(head, target, work, options.minutes)
    training.load()
    while True:
        start = time.monotonic()
        if not training.curve or training.curve[-1]["step"] < training.step:
            found = {"step": training.step, "tokens": training.num_tokens, "s": round(training.elapsed_s)}
            found |= {"loss": round(training.loss, 3)} | measure(head, target, greedy, text)
            training.curve.append(found)
            print(json.dumps(found), flush=True)
            num_bytes = head.save(options.out)
            training.elapsed_s += time.monotonic() - start
            training.save()
            metrics = {"bytes": num_bytes, "training_tokens": len(training_ids), "curve": training.curve}
            (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        if training.done:
            break
        training.run(training_ids, options.batch, options.length, options.save_minutes * 60)


if __name__ == "__main__":
    main()
