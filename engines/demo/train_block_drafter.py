"""Train a block drafter (DFlash, arXiv 2602.06036) for the demo target: an hour of one CPU core, resumable.

One pass drafts a block: the last committed token, then masks, which see each other and hidden rows of the target. Text
and measure are those of train_eagle3_head.py. The loss is the cross entropy to the target's own distribution at each
place of blocks that begin anywhere in the text. Needs PyTorch, tokenizers and safetensors, no network.

    python engines/demo/train_block_drafter.py --out block --minutes 70  # stopped at any time; the same command goes on

Writes OUT/config.json and OUT/model.safetensors in the published layout, again and again, OUT/metrics.json with the
acceptance measured on the way, and OUT/work, which holds what a later run goes on from and can be deleted at the end.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from head_training import (
    Training,
    continue_greedily,
    load_target,
    measure,
    norm,
    parser_of,
    prepare,
    read_text,
    rotation,
    run_target,
    train,
    windows,
)
from train_demo_pair import RMS_NORM_EPS, Llama, Sizes, draw

LAYERS = (2, 5, 8)  # of the target, whose entering hidden rows the drafter reads; 8: what leaves the last
BLOCK_SIZE = 8
NUM_PLACES = BLOCK_SIZE - 1  # with a draft: all rows but the first
MASK_TOKEN = 188  # the byte FF, which UTF-8 never holds
FLOOR = 0.2  # of a place's weight in the loss: the rest is how likely the drafts before it are kept


class DrafterLayer(nn.Module):
    def __init__(self, sizes: Sizes, inner: int) -> None:
        super().__init__()
        hidden, kv_size = sizes.hidden, sizes.kv_heads * sizes.head_dim
        self.sizes = sizes
        self.input_norm, self.post_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(sizes.head_dim)), nn.Parameter(torch.ones(sizes.head_dim))
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = nn.Linear(hidden, kv_size, bias=False), nn.Linear(hidden, kv_size, bias=False)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [batch, kv_heads, rows, head_dim] of x [batch, rows, hidden]."""
        k, v = (part(x).unflatten(2, (self.sizes.kv_heads, -1)).transpose(1, 2) for part in (self.k, self.v))
        return rotate(norm(k.float(), self.k_norm), cos, sin), v

    def forward(
        self, x: Tensor, context: tuple[Tensor, Tensor], hidden_from: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """x [batch, anchors * BLOCK_SIZE, hidden]; context: K and V of its rows; hidden_from [anchors, context rows]:
        where a block does not see the row."""
        batch, num_rows, _ = x.shape
        sizes, num_blocks = self.sizes, len(hidden_from)
        h = norm(x, self.input_norm)
        q = self.q(h).unflatten(2, (sizes.kv_heads, -1, sizes.head_dim)).permute(0, 2, 3, 1, 4)
        q = rotate(norm(q.float(), self.q_norm), cos, sin) / math.sqrt(sizes.head_dim)
        group = q.shape[2]
        q = q.unflatten(3, (num_blocks, BLOCK_SIZE)).permute(0, 1, 3, 4, 2, 5)  # kv head, block, row, head of the group
        k, v = (part.unflatten(2, (num_blocks, BLOCK_SIZE)) for part in self.keys(h, cos, sin))
        by_block, k_context = q.flatten(3, 4), context[0]
        of_context = (by_block.flatten(2, 3) @ k_context.transpose(-1, -2)).unflatten(2, (num_blocks, -1)).float()
        of_context = of_context.masked_fill(hidden_from[:, None], -torch.inf)
        scores = torch.cat([of_context, (by_block @ k.transpose(-1, -2)).float()], -1)
        probs = scores.softmax(-1).to(v.dtype)
        seen = (probs[..., :-BLOCK_SIZE].flatten(2, 3) @ context[1]).unflatten(2, (num_blocks, -1))
        seen = (seen + probs[..., -BLOCK_SIZE:] @ v).unflatten(3, (BLOCK_SIZE, group))
        x = x + self.o(seen.permute(0, 2, 3, 1, 4, 5).reshape(batch, num_rows, -1))
        h = norm(x, self.post_norm)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return t * cos + torch.cat([-second, first], -1) * sin


class Drafter(nn.Module):
    """Row j of a block that begins at position n predicts the token of position n + j.

    scale [features]: evens out the target's channels while the drafter is trained; `save` folds it into fc."""

    def __init__(self, target: Llama, scale: Tensor, num_layers: int, inner: int) -> None:
        super().__init__()
        self.sizes, self.inner = target.sizes, inner
        self.fc = nn.Linear(len(scale), target.sizes.hidden, bias=False)
        layers = [DrafterLayer(target.sizes, inner) for _ in range(num_layers)]
        self.blocks = nn.ModuleList([*layers, self.fc])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * num_layers) if residual else 1))
        self.hidden_norm = nn.Parameter(torch.ones(target.sizes.hidden))
        self.norm = nn.Parameter(target.norm.clone())
        self.register_buffer("embedding", target.embed.weight, persistent=False)
        self.register_buffer("scale", scale)

    @property
    def layers(self) -> list[Any]:
        return list(self.blocks)[:-1]

    def forward(self, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Rows of each place before the LM head [batch, anchors, NUM_PLACES, hidden] of the blocks that begin at
        positions `anchors` of ids [batch, length]; features [batch, length, features] of the target."""
        batch, length = ids.shape
        tokens = torch.full((batch, len(anchors), BLOCK_SIZE), MASK_TOKEN)
        tokens[..., 0] = ids[:, anchors]
        positions = (anchors[:, None] + torch.arange(BLOCK_SIZE)).flatten()
        unseen = torch.arange(length)[None] >= anchors[:, None]
        cos, sin = rotation(self.sizes, length + BLOCK_SIZE)
        context = norm(self.fc(features * self.scale).float(), self.hidden_norm)
        x = F.embedding(tokens.flatten(1), self.embedding)
        for layer in self.layers:
            x = layer(x, layer.keys(context, cos[:length], sin[:length]), unseen, cos[positions], sin[positions])
        return norm(x, self.norm).unflatten(1, (len(anchors), BLOCK_SIZE))[:, :, 1:]

    def published(self) -> dict[str, Tensor]:
        """Parameters by the published names."""
        found = {"fc.weight": self.fc.weight, "hidden_norm.weight": self.hidden_norm, "norm.weight": self.norm}
        for i, layer in enumerate(self.layers):
            name = f"layers.{i}."
            found |= {f"{name}input_layernorm.weight": layer.input_norm}
            found |= {f"{name}post_attention_layernorm.weight": layer.post_norm}
            found |= {f"{name}self_attn.{part}_proj.weight": getattr(layer, part).weight for part in "qkvo"}
            found |= {f"{name}self_attn.{part}_norm.weight": getattr(layer, f"{part}_norm") for part in "qk"}
            found |= {f"{name}mlp.{part}_proj.weight": getattr(layer, part).weight for part in ("gate", "up", "down")}
        return found

    def save(self, directory: Path) -> int:
        """Write the checkpoint in the published layout -> bytes of its tensors' file."""
        sizes, weights = self.sizes, self.published()
        weights["fc.weight"] = self.fc.weight * self.scale
        tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
        save_file(tensors, directory / "model.safetensors.tmp", {"format": "pt"})
        os.replace(directory / "model.safetensors.tmp", directory / "model.safetensors")
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "rms_norm_eps": RMS_NORM_EPS,
            "rope_theta": sizes.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "layer_types": ["full_attention"] * len(self.layers),
            "sliding_window": None,
            "use_sliding_window": False,
            "block_size": BLOCK_SIZE,
            "num_target_layers": sizes.layers,
            # These are the layers that the rows leave.
            "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [layer - 1 for layer in LAYERS]},
            "torch_dtype": "bfloat16",
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        return (directory / "model.safetensors").stat().st_size


@torch.no_grad()
def load_drafter(directory: Path, target: Llama) -> Drafter:
    """Read a checkpoint that `save` wrote."""
    config = json.loads((directory / "config.json").read_text())
    scale = torch.ones(len(LAYERS) * target.sizes.hidden)
    drafter = Drafter(target, scale, config["num_hidden_layers"], config["intermediate_size"])
    weights = load_file(directory / "model.safetensors")
    for name, parameter in drafter.published().items():
        parameter.copy_(weights[name])
    return drafter


def logits_of(drafter: Drafter, target: Llama, ids: Tensor, anchors: Tensor) -> Iterator[Tensor]:
    """Yield logits of each place [batch, anchors, vocab]; blocks begin at `anchors` of ids [batch, length]."""
    rows = drafter(run_target(target, ids, LAYERS)[0], ids, anchors)
    return (F.linear(rows[:, :, place], target.embed.weight) for place in range(NUM_PLACES))


class BlockTraining(Training):
    place_weight = 1.0
    num_anchors = 32

    def losses(self, ids: Tensor) -> list[Tensor]:
        """Return the loss of each place; ids [batch, length]."""
        anchors = torch.randperm(ids.shape[1] - NUM_PLACES)[: self.num_anchors].sort().values
        with torch.autocast("cpu", torch.bfloat16):
            features, last = run_target(self.target, ids, LAYERS)
            found = self.head(features, ids, anchors)
            losses, survival = [], torch.ones(())
            for place in range(NUM_PLACES):
                probs = F.linear(last[:, anchors + place], self.target.embed.weight).float().softmax(-1)
                own = F.linear(found[:, :, place], self.target.embed.weight).float().log_softmax(-1)
                weight = FLOOR + (1 - FLOOR) * survival
                losses.append(-((probs * own).sum(-1) * weight).mean())
                survival = survival * torch.minimum(probs, own.detach().exp()).sum(-1)
        return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, minutes=70)
    parser.set_defaults(batch=8)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--inner", type=int, default=288)
    parser.add_argument(
        "--anchors", type=int, default=32, help="blocks that a step learns from, of each window of text"
    )
    options = parser.parse_args(arguments)
    work = prepare(options)
    training_ids, held_out = read_text(work, options.target)
    target = load_target(options.target)
    greedy = continue_greedily(target, work, held_out)
    sample = run_target(target, draw(training_ids, options.batch, options.length)[0], LAYERS)[0]
    drafter = Drafter(target, sample.square().mean((0, 1)).rsqrt(), options.num_layers, options.inner)
    text = windows(held_out, options.length)

    def found() -> dict[str, Any]:
        return measure(lambda *at: logits_of(drafter, target, *at), NUM_PLACES, target, greedy, text)

    print(f"{len(training_ids) / 1e6:.2f}M training tokens", flush=True)
    training = BlockTraining(drafter, target, work, options.minutes)
    training.num_anchors = options.anchors
    train(training, training_ids, options, found)


if __name__ == "__main__":
    main()
