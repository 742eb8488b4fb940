"""Opened draft heads, from which engines are built."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.heads.block import BlockConfig
from faser_trtllm.models.heads.eagle3 import Eagle3Config
from faser_trtllm.models.heads.medusa import MedusaConfig, MedusaWeights
from faser_trtllm.models.heads.mtp import MtpConfig, MtpWeights


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3Head:
    """An EAGLE-3 head. target_ids: token id of each output [draft_vocab_size]; None if output i is token i."""

    config: Eagle3Config
    target_ids: npt.NDArray[np.int32] | None
    kind: ClassVar[str] = "eagle3"  # its name in an engine's files

    def __str__(self) -> str:
        return "an EAGLE-3 head"


@dataclasses.dataclass(frozen=True, slots=True)
class MedusaHeads:
    config: MedusaConfig
    weights: MedusaWeights
    kind: ClassVar[str] = "medusa"

    def __str__(self) -> str:
        return "Medusa heads"


@dataclasses.dataclass(frozen=True, slots=True)
class MtpLayer:
    config: MtpConfig
    weights: MtpWeights
    kind: ClassVar[str] = "mtp"

    def __str__(self) -> str:
        return "an MTP layer"


@dataclasses.dataclass(frozen=True, slots=True)
class BlockDrafter:
    config: BlockConfig
    kind: ClassVar[str] = "block"

    def __str__(self) -> str:
        return "a block drafter"

    def sizes(self) -> dict[str, Any]:
        found = dataclasses.asdict(self.config)
        for name in ("model", "target_hidden_size"):
            del found[name]
        lists = {name: [int(value) for value in found[name]] for name in ("layers", "windows", "causal")}
        return found | lists | {"num_features": self.config.num_features}


Head = Eagle3Head | MedusaHeads | MtpLayer | BlockDrafter
