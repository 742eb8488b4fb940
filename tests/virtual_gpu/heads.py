"""Checkpoints of tiny targets with a draft head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.block_drafter import make_block_drafter
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_speculators_head
from tests.support.medusa import make_medusa
from tests.support.mtp import make_mimo

KINDS = ("eagle3", "medusa", "mtp", "dflash", "dspark", "dflash2")
SIZES: dict[str, Any] = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
# The embedding, a layer behind an exit, and what leaves the last.
LAYERS = (0, 1, 3)


def checkpoints(root: Path, kind: str) -> tuple[Path, Path | None]:
    """Return the target and its head; an MTP layer is the target's own."""
    if kind == "mtp":
        return make_mimo(root / "t", **SIZES), None
    target = make_checkpoint(root / "t", **SIZES)
    if kind == "medusa":
        return target, make_medusa(root / "h", target, num_heads=4, num_layers=2)
    if kind.startswith("d"):
        return target, make_block_drafter(root / "h", target, kind, layers=(1, 3), block_size=5, windows=(12, 12))
    norms: dict[str, Any] = {"norm_before_fc": True, "norm_output": True, "qk_norm": True}
    return target, make_speculators_head(root / "h", target, layers=LAYERS, num_layers=2, draft_vocab_size=200, **norms)
