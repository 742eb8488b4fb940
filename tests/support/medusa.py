"""Random Medusa heads in the published layouts, and the published forward pass in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from tests.support.checkpoints import write_safetensors


def make_medusa(
    directory: Path,
    target_dir: Path,
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    layout: str = "medusa",
    biases: bool = True,
    torch_file: str | None = None,
    seed: int = 0,
    spare: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Write heads for a target's checkpoint; layout: FasterDecoding's, the same behind `medusa_head.`, or vLLM's.

    torch_file: in torch's own format, of this name. overrides: keys of config.json, None removes one.
    """
    target = json.loads((target_dir / "config.json").read_text())
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    rng = np.random.default_rng(seed)

    def matrix(num_out: int, num_in: int, scale: float) -> np.ndarray:
        values = rng.standard_normal((num_out, num_in), np.float32) * np.float32(scale * num_in**-0.5)
        return torch.from_numpy(values).bfloat16().float().numpy()

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            block = f"blocks.{head}.layers.{layer}" if layout == "vllm" else f"{head}.{layer}.linear"
            tensors[f"{block}.weight"] = matrix(hidden, hidden, 1.0)
            if biases:
                tensors[f"{block}.bias"] = matrix(1, hidden, 4.0)[0]
        lm_head = f"lm_heads.{head}.weight" if layout == "vllm" else f"{head}.{num_layers}.weight"
        tensors[lm_head] = matrix(vocab, hidden, 3.0)
    if layout == "prefixed":
        tensors = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in (tensors | (spare or {})).items() if name not in without}
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers} | overrides
    directory.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept, indent=2))
    if torch_file is None:
        write_safetensors(directory, tensors, "bfloat16")
    else:
        of_torch = {name: torch.from_numpy(tensor).bfloat16() for name, tensor in tensors.items()}
        torch.save(of_torch, directory / torch_file)
    return directory


class TorchMedusa:
    """The heads' forward pass in fp32, as FasterDecoding/Medusa medusa/model/medusa_model.py has it."""

    def __init__(self, directory: Path, target_dir: Path) -> None:
        """directory: heads in FasterDecoding's layout."""
        config = json.loads((directory / "config.json").read_text())
        self.num_heads, self._num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
        with safe_open(directory / "model.safetensors", "pt") as file:
            self._weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        with safe_open(target_dir / "model.safetensors", "pt") as file:
            self._norm = file.get_tensor("model.norm.weight").float()
        self._eps = json.loads((target_dir / "config.json").read_text())["rms_norm_eps"]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [hidden] that leaves the target's last layer at a position -> logits [heads, vocab] of the tokens two
        and more behind it."""
        x = hidden * torch.rsqrt(hidden.square().mean() + self._eps) * self._norm
        found = []
        for head in range(self.num_heads):
            h = x
            for layer in range(self._num_layers):
                name = f"{head}.{layer}.linear"
                bias = self._weights.get(f"{name}.bias")
                h = h + torch.nn.functional.silu(torch.nn.functional.linear(h, self._weights[f"{name}.weight"], bias))
            found.append(self._weights[f"{head}.{self._num_layers}.weight"] @ h)
        return torch.stack(found)
