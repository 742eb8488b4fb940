"""Compare the demo's drafters by one measure: the draft model, the EAGLE-3 head and the block drafter.

    python engines/demo/compare_drafters.py --work OUT/work     # of a training, or a new folder

Prints a table: tokens per pass with 7 drafts where the target goes on greedily from held-out prompts, how often each
place is kept given those before it, and the tokens of a pass that begins anywhere in held-out text at temperature 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import train_block_drafter as block
import train_eagle3_head as eagle3
from head_training import HERE, continue_greedily, load_target, measure, read_text, run_target, windows
from train_demo_pair import Llama

NUM_PLACES = block.NUM_PLACES


def logits_of_draft(draft: Llama, ids: Tensor, anchors: Tensor) -> Iterator[Tensor]:
    logits = draft(ids)
    return (logits[:, anchors + place] for place in range(NUM_PLACES))


def logits_of_head(head: eagle3.Head, target: Llama, ids: Tensor, anchors: Tensor) -> Iterator[Tensor]:
    features, rows = run_target(target, ids, eagle3.LAYERS)[0], anchors - 1
    for place, logits in enumerate(head(features, target.embed(ids), NUM_PLACES, rows)):
        found = torch.full((len(ids), len(anchors), target.sizes.vocab), -torch.inf)
        found[..., head.draft_ids] = logits if place else logits[:, rows]
        yield found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the text and of the target's output")
    for name in ("target", "draft", "eagle3", "block"):
        parser.add_argument(f"--{name}", type=Path, default=HERE / name)
    parser.add_argument("--length", type=int, default=256, help="of the windows of text")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    held_out = read_text(options.work, options.target)[1]
    target, draft = load_target(options.target), load_target(options.draft)
    head, drafter = eagle3.load_head(options.eagle3, target), block.load_drafter(options.block, target)
    greedy, text = continue_greedily(target, options.work, held_out), windows(held_out, options.length)
    drafters: dict[str, Callable[[Tensor, Tensor], Iterable[Tensor]]] = {
        "draft": lambda *at: logits_of_draft(draft, *at),
        "eagle3": lambda *at: logits_of_head(head, target, *at),
        "block": lambda *at: block.logits_of(drafter, target, *at),
    }
    places = " | ".join(str(1 + place) for place in range(NUM_PLACES))
    print(f"| drafter | tokens per pass | {places} | on text |\n|{'---|' * (NUM_PLACES + 3)}")
    for name, logits_of in drafters.items():
        found = measure(logits_of, NUM_PLACES, target, greedy, text)
        shares = " | ".join(f"{share:.2f}" for share in found["greedy_by_place"])
        print(f"| `{name}` | {found['tokens_per_pass']:.2f} | {shares} | {found['on_text']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
