"""Read the checkpoint of Medusa heads (arXiv 2401.10774) in the published layouts.

Tensors of head I are named `I.J.linear.*` and `I.LAYERS.weight`, also after `medusa_head.` or `medusa_heads.`
(FasterDecoding), or `blocks.I.layers.J.*` and `lm_heads.I.weight` (vLLM).
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig, architectures_of, read_json
from faser_trtllm.models.heads.torch_file import HeadFiles
from faser_trtllm.models.weights import DerivedWeights, Dtype, Weights, check_shapes

_SOURCE = "config.json"
_PREFIX = re.compile(r"^(model\.)?(medusa_heads?\.)?")
_BLOCK = re.compile(r"^(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+)(?:\.linear)?)\.(weight|bias)$")
_LM_HEAD = re.compile(r"^(?:(\d+)\.(\d+)|lm_heads\.(\d+))\.weight$")


@dataclasses.dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Medusa heads. num_heads: heads, each of which drafts one token. num_layers: residual blocks of each head."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


def is_medusa(checkpoint_dir: Path) -> bool:
    """Return True if config.json describes Medusa heads; CheckpointError if it is unreadable."""
    data = read_json(checkpoint_dir / _SOURCE)
    named = any("medusa" in name.lower() for name in architectures_of(data))
    return named or data.get("model_type") == "medusa" or "medusa_num_heads" in data


class MedusaWeights(DerivedWeights):
    """Tensors of head I under our names: `I.residual.J` [hidden, hidden], `I.residual_bias.J` [hidden] (zeros if the
    checkpoint has none) and `I.lm_head` [vocab, hidden]."""

    def __init__(self, files: HeadFiles) -> None:
        """Map the names; CheckpointError for a tensor that no layout has or that occurs twice."""
        self._files = files
        self._names: dict[str, str] = {}
        num_layers, lm_places = 0, set()
        for name in files:
            short = _PREFIX.sub("", name)
            block, lm_head = _BLOCK.match(short), _LM_HEAD.match(short)
            if block is not None:
                head, layer = (int(n) for n in block.groups()[:4] if n is not None)
                self._add(f"{head}.residual{'_bias' if block[5] == 'bias' else ''}.{layer}", name)
                num_layers = max(num_layers, layer + 1)
            elif lm_head is not None:
                self._add(f"{int(lm_head[1] or lm_head[3])}.lm_head", name)
                if lm_head[2] is not None:
                    lm_places.add(int(lm_head[2]))
            else:
                raise CheckpointError(f"tensor {name} is not one that Medusa heads have, so they cannot be run")
        self.num_heads = sum(name.endswith(".lm_head") for name in self._names)
        self.num_layers = num_layers
        if lm_places and lm_places != {num_layers}:
            raise CheckpointError(f"the LM head of a Medusa head must follow its {num_layers} residual blocks")

    def source(self, name: str) -> tuple[Weights, str]:
        found = self._names.get(name)
        if found is None:
            head, part, *layer = name.split(".")
            what = "the LM head" if part == "lm_head" else f"residual block {layer[0]}"
            raise CheckpointError(f"{what} of Medusa head {head} is missing; fetch the checkpoint again")
        return self._files, found

    def shape(self, name: str) -> tuple[int, ...]:
        if self._is_no_bias(name):
            return super().shape(name.replace("_bias", ""))[:1]
        return super().shape(name)

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        return np.zeros(self.shape(name), dtype) if self._is_no_bias(name) else super().read(name, dtype)

    def _add(self, ours: str, name: str) -> None:
        if ours in self._names:
            raise CheckpointError(f"tensors {self._names[ours]} and {name} of the Medusa heads are the same one")
        self._names[ours] = name

    def _is_no_bias(self, name: str) -> bool:
        return ".residual_bias." in name and name not in self._names


def expected_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Return {our name: shape} of every tensor, head by head."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            shapes[f"{head}.residual.{layer}"] = (hidden, hidden)
            shapes[f"{head}.residual_bias.{layer}"] = (hidden,)
        shapes[f"{head}.lm_head"] = (config.vocab_size, hidden)
    return shapes


def load_medusa_config(checkpoint_dir: Path, weights: MedusaWeights, target: ModelConfig) -> MedusaConfig:
    """Read the heads' config.json; CheckpointError if it does not fit the target or the tensors."""
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
    check_shapes(weights, expected_shapes(config))
    return config
