"""Medusa heads' checkpoint (arXiv 2401.10774) in the layouts that are published.

Names: FasterDecoding's `I.J.linear.*` and `I.LAYERS.weight`, also behind `medusa_head.` or `medusa_heads.`; vLLM's
`blocks.I.layers.J.*` and `lm_heads.I.weight`. A residual block without a bias has none.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig, read_json
from faser_trtllm.models.torch_file import HeadFiles

_SOURCE = "config.json"
_PREFIX = re.compile(r"^(model\.)?(medusa_heads?\.)?")
_BLOCK = re.compile(r"^(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+)(?:\.linear)?)\.(weight|bias)$")
_LM_HEAD = re.compile(r"^(?:(\d+)\.(\d+)|lm_heads\.(\d+))\.weight$")


@dataclasses.dataclass(frozen=True, slots=True)
class MedusaConfig:
    """num_heads: drafts in a row. num_layers: residual blocks of each head."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


def is_medusa(checkpoint_dir: Path) -> bool:
    """Whether config.json says so; CheckpointError if it is unreadable."""
    data = read_json(checkpoint_dir / _SOURCE)
    architectures = data.get("architectures") or []
    named = any("medusa" in str(name).lower() for name in architectures)
    return named or data.get("model_type") == "medusa" or "medusa_num_heads" in data


class MedusaWeights:
    """Tensors of the heads by their numbers."""

    def __init__(self, files: HeadFiles) -> None:
        """CheckpointError for a tensor that no layout has."""
        self._files = files
        self._blocks: dict[tuple[int, int, str], str] = {}
        self._lm_heads: dict[int, str] = {}
        lm_places = set()
        for name in files:
            short = _PREFIX.sub("", name)
            block, lm_head = _BLOCK.match(short), _LM_HEAD.match(short)
            if block is not None:
                head, layer = (int(n) for n in block.groups()[:4] if n is not None)
                key = (head, layer, block[5])
                self._check_new(self._blocks.get(key), name)
                self._blocks[key] = name
            elif lm_head is not None:
                number = int(lm_head[1] or lm_head[3])
                self._check_new(self._lm_heads.get(number), name)
                self._lm_heads[number] = name
                if lm_head[2] is not None:
                    lm_places.add(int(lm_head[2]))
            else:
                raise CheckpointError(f"tensor {name} is not one that Medusa heads have, so they cannot be run")
        self.num_heads = len(self._lm_heads)
        self.num_layers = 1 + max((layer for _, layer, _ in self._blocks), default=-1)
        if lm_places and lm_places != {self.num_layers}:
            raise CheckpointError(f"the LM head of a Medusa head must follow its {self.num_layers} residual blocks")

    def residual(self, head: int, layer: int, hidden: int) -> npt.NDArray[np.uint16]:
        """bf16 bits [hidden, hidden]."""
        return self._files.bfloat16(self._name(head, layer), (hidden, hidden))

    def residual_bias(self, head: int, layer: int, hidden: int) -> npt.NDArray[np.float32]:
        name = self._blocks.get((head, layer, "bias"))
        return np.zeros(hidden, np.float32) if name is None else self._files.float32(name, (hidden,))

    def lm_head(self, head: int, vocab: int, hidden: int) -> npt.NDArray[np.uint16]:
        """bf16 bits [vocab, hidden]."""
        if head not in self._lm_heads:
            raise CheckpointError(f"the LM head of Medusa head {head} is missing; fetch the checkpoint again")
        return self._files.bfloat16(self._lm_heads[head], (vocab, hidden))

    def _name(self, head: int, layer: int) -> str:
        name = self._blocks.get((head, layer, "weight"))
        if name is None:
            raise CheckpointError(
                f"residual block {layer} of Medusa head {head} is missing; fetch the checkpoint again"
            )
        return name

    def check(self, config: MedusaConfig) -> None:
        """CheckpointError for the first tensor that is missing or of another shape."""
        for head in range(config.num_heads):
            for layer in range(config.num_layers):
                self.residual(head, layer, config.hidden_size)
                self.residual_bias(head, layer, config.hidden_size)
            self.lm_head(head, config.vocab_size, config.hidden_size)

    @staticmethod
    def _check_new(known: str | None, name: str) -> None:
        if known is not None:
            raise CheckpointError(f"tensors {known} and {name} of the Medusa heads are the same one")


def load_medusa_config(checkpoint_dir: Path, weights: MedusaWeights, target: ModelConfig) -> MedusaConfig:
    """Read config.json beside a target; CheckpointError in one sentence for what is missing or does not fit it."""
    data = read_json(checkpoint_dir / _SOURCE)
    for key, wanted in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if data.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{_SOURCE}: {key} of the Medusa heads is {data[key]!r}, the target has {wanted}; use the heads that "
                "were trained for this target"
            )
    truncated = data.get("truncated_vocab_size", target.vocab_size)
    if truncated != target.vocab_size:
        raise CheckpointError(
            f"{_SOURCE}: truncated_vocab_size is {truncated!r}, only Medusa heads over the whole vocabulary "
            f"({target.vocab_size}) are supported"
        )
    counts = []
    for what, keys, found in (
        ("heads", ("medusa_num_heads", "num_heads"), weights.num_heads),
        ("residual blocks", ("medusa_num_layers", "num_hidden_layers"), weights.num_layers),
    ):
        key = next((key for key in keys if data.get(key) is not None), keys[0])
        count = found if data.get(key) is None else data[key]
        if not isinstance(count, int) or not 1 <= count <= found:
            raise CheckpointError(f"{_SOURCE}: {key} is {count!r}, the checkpoint has {found} {what}")
        counts.append(count)
    if counts[1] != weights.num_layers:
        raise CheckpointError(
            f"{_SOURCE}: the Medusa heads have {weights.num_layers} residual blocks each, not {counts[1]}"
        )
    config = MedusaConfig(counts[0], counts[1], target.hidden_size, target.vocab_size)
    weights.check(config)
    return config
