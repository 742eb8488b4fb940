"""Train an EAGLE-3 head (arXiv 2503.01840) for the demo target: an hour of one CPU core, resumable.

Text: the standard library of the running Python, without the files that prompts of benches are drawn from. The loss is
the cross entropy to the target's own distribution, over three steps of training-time test. Needs PyTorch, tokenizers
and safetensors, no network.

    python engines/demo/train_eagle3_head.py --out head --minutes 60     # stopped at any time; the same command goes on

Writes OUT/config.json and OUT/model.safetensors in the published layout, again and again, OUT/metrics.json with the
acceptance measured on the way, and OUT/work, which holds what a later run goes on from and can be deleted at the end.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from head_training import (
    PROMPT_LEN,
    Training,
    acceptance,
    continue_greedily,
    load_target,
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

LAYERS = (2, 5, 8)  # of the target, whose entering hidden rows the head reads; 8: what leaves the last
NUM_STEPS = 3  # of training-time test
LATER_ROWS = 0.25  # share of the rows that take the later steps
NUM_PLACES = 4  # that are measured


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
        """Return the logits of each step, [batch, rows, draft_vocab]: the first step has all length - num_steps rows,
        the later ones have `rows`. A later step reads the head's own output in place of the features; its row sees
        the first step's rows up to its own, and what its own earlier steps left."""
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
            probs = (torch.cat([scores, *of_own], -1) / math.sqrt(self.sizes.head_dim)).softmax(-1).to(v.dtype)
            attended = probs[..., :num_rows] @ v
            for i, (_, v_own) in enumerate(own):
                attended = attended + probs[..., num_rows + i, None] * v_own
            hidden = self._finish(hidden, attended)
            found.append(self._logits(hidden))
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(norm(hidden, self.norm), self.lm_head)

    def published(self) -> dict[str, Tensor]:
        """Parameters by the published names."""
        layer = self.blocks[0]
        found = {
            "fc.weight": layer.fc.weight,
            "midlayer.input_layernorm.weight": layer.input_norm,
            "midlayer.hidden_norm.weight": layer.hidden_norm,
            "midlayer.post_attention_layernorm.weight": layer.post_norm,
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
        }
        found |= {f"midlayer.self_attn.{name}_proj.weight": getattr(layer, name).weight for name in "qkvo"}
        return found | {
            f"midlayer.mlp.{name}_proj.weight": getattr(layer, name).weight for name in ("gate", "up", "down")
        }

    def save(self, directory: Path) -> int:
        """Write the checkpoint in the published layout -> bytes of its tensors' file."""
        sizes, weights = self.sizes, self.published()
        weights["fc.weight"] = self.blocks[0].fc.weight * self.scale
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


@torch.no_grad()
def load_head(directory: Path, target: Llama) -> Head:
    """Read a checkpoint that `save` wrote."""
    weights = load_file(directory / "model.safetensors")
    inner = len(weights["midlayer.mlp.up_proj.weight"])
    draft_ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    head = Head(target, draft_ids, torch.ones(len(LAYERS) * target.sizes.hidden), inner)
    for name, parameter in head.published().items():
        parameter.copy_(weights[name])
    return head


@torch.no_grad()
def measure(head: Head, target: Llama, greedy: Tensor, text: Tensor) -> dict[str, Any]:
    """`acceptance`, and how often the first place's greedy choice is the target's on text [batch, length]."""

    def proposals(ids: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        rows = torch.arange(ids.shape[1] - num_steps)
        return [head.draft_ids[x.argmax(-1)] for x in head(features, target.embed(ids), num_steps, rows)]

    by_place = acceptance(proposals(greedy, run_target(target, greedy, LAYERS)[0], NUM_PLACES), greedy)
    features, last = run_target(target, text, LAYERS)
    choice = F.linear(last, target.embed.weight).argmax(-1)
    on_text = (proposals(text, features, 1)[0] == choice[:, 1:]).float().mean().item()
    return {"greedy_by_place": by_place, "on_text": round(on_text, 3)}


class Eagle3Training(Training):
    def losses(self, ids: Tensor) -> list[Tensor]:
        """Return the loss of each position; ids: [batch, length]."""
        num_rows = ids.shape[1] - NUM_STEPS
        rows = torch.randperm(num_rows)[: int(num_rows * LATER_ROWS)].sort().values
        with torch.autocast("cpu", torch.bfloat16):
            features, last = run_target(self.target, ids, LAYERS)
            all_probs = F.linear(last, self.target.embed.weight[self.head.draft_ids]).float().softmax(-1)
            found = self.head(features, self.target.embed(ids), NUM_STEPS, rows)
        losses = []
        for step, logits in enumerate(found):
            probs = all_probs[:, (torch.arange(num_rows) if step == 0 else rows) + 1 + step]
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), probs.flatten(0, 1)))
        return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, minutes=60)
    parser.add_argument("--draft-vocab", type=int, default=1536)
    parser.add_argument("--inner", type=int, default=512)
    options = parser.parse_args(arguments)
    work = prepare(options)
    training_ids, held_out = read_text(work, options.target)
    target = load_target(options.target)
    counts = torch.bincount(training_ids, minlength=target.sizes.vocab)
    draft_ids = counts.topk(options.draft_vocab).indices.sort().values
    sample = run_target(target, draw(training_ids, options.batch, options.length)[0], LAYERS)[0]
    head = Head(target, draft_ids, sample.square().mean((0, 1)).rsqrt(), options.inner)
    greedy = continue_greedily(target, work, held_out)
    text = windows(held_out, options.length)
    drafted = torch.isin(greedy[:, PROMPT_LEN:], draft_ids).float().mean()
    print(
        f"{len(training_ids) / 1e6:.2f}M training tokens; in the draft vocabulary are "
        f"{counts[draft_ids].sum() / counts.sum():.3f} of them and {drafted:.3f} of the target's own",
        flush=True,
    )
    training = Eagle3Training(head, target, work, options.minutes)
    train(training, training_ids, options, lambda: measure(head, target, greedy, text))


if __name__ == "__main__":
    main()
