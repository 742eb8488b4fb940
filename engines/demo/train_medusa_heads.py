"""Train Medusa heads (arXiv 2401.10774) for the demo target: minutes of one CPU core, resumable.

Text, measurement and files are those of train_eagle3_head.py. A head begins as the target's own LM head.

    python engines/demo/train_medusa_heads.py --out heads --minutes 10

Writes OUT/config.json and OUT/model.safetensors in the published layout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from head_training import (
    Training,
    acceptance,
    continue_greedily,
    load_target,
    parser_of,
    prepare,
    read_text,
    run_target,
    train,
)
from train_demo_pair import Llama

LAW_ROWS = 0.25  # share of the positions that a step learns from, since the LM heads are most of the work


class Heads(nn.Module):
    """Head i reads the target's normed last hidden row of position t and predicts token t + 2 + i."""

    def __init__(self, target: Llama, num_heads: int) -> None:
        super().__init__()
        hidden = target.sizes.hidden
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_heads))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.lm_heads = nn.ParameterList(target.embed.weight.clone() for _ in range(num_heads))

    def forward(self, last: Tensor) -> list[Tensor]:
        """last [.., hidden] -> logits of each head [.., vocab]."""
        return [
            F.linear(last + F.silu(block(last)), weight)
            for block, weight in zip(self.blocks, self.lm_heads, strict=True)
        ]

    def save(self, directory: Path) -> int:
        """Write the checkpoint in the published layout -> bytes of its tensors' file."""
        weights: dict[str, Tensor] = {}
        for i, (block, weight) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            weights |= {f"{i}.0.linear.weight": block.weight, f"{i}.0.linear.bias": block.bias, f"{i}.1.weight": weight}
        tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
        save_file(tensors, directory / "model.safetensors.tmp", {"format": "pt"})
        os.replace(directory / "model.safetensors.tmp", directory / "model.safetensors")
        config = {"model_type": "medusa", "medusa_num_heads": len(self.blocks), "medusa_num_layers": 1}
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        return (directory / "model.safetensors").stat().st_size


class MedusaTraining(Training):
    def losses(self, ids: Tensor) -> list[Tensor]:
        num_heads = len(self.head.blocks)
        rows = torch.randperm(ids.shape[1] - num_heads)[: int(ids.shape[1] * LAW_ROWS)]
        with torch.autocast("cpu", torch.bfloat16):
            _, last = run_target(self.target, ids)
            found = self.head(last[:, rows])
        losses = []
        for i, logits in enumerate(found):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                probs = F.linear(last[:, rows + 1 + i], self.target.embed.weight).float().softmax(-1)
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), probs.flatten(0, 1)))
        return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, minutes=10)
    parser.add_argument("--num-heads", type=int, default=3)
    options = parser.parse_args(arguments)
    work = prepare(options)
    training_ids, held_out = read_text(work, options.target)
    target = load_target(options.target)
    heads = Heads(target, options.num_heads)
    greedy = continue_greedily(target, work, held_out)

    @torch.no_grad()
    def measure() -> dict[str, list[float]]:
        proposals = [logits.argmax(-1) for logits in heads(run_target(target, greedy)[1])]
        return {"greedy_by_place": acceptance(proposals, greedy)}

    train(MedusaTraining(heads, target, work, options.minutes), training_ids, options, measure)


if __name__ == "__main__":
    main()
