"""The forward pass of a block drafter in plain torch, as the published code has it.

DFlash: z-lab/dflash (dflash/model.py), vllm (models/qwen3_dflash.py). DFlash2: vllm (models/qwen3_dflash2.py,
spec_decode/dflash2). DSpark: DeepSpec (modeling/dspark), vllm (spec_decode/dspark). It reads config.json by itself, so
that a test of ours compares two readers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class TorchBlockDrafter:
    """In fp32, from bf16 weights. The wrong ways, for negative controls: causal (of all layers), position_shift (of the
    block), norms_context (rows of the context pass through input_layernorm), first_slot."""

    def __init__(
        self,
        drafter_dir: Path,
        target_dir: Path,
        *,
        first_slot: int | None = None,
        causal: bool | None = None,
        position_shift: int = 0,
        norms_context: bool = False,
        rounded: bool = False,
    ) -> None:
        """rounded: to bf16 where an engine rounds (inputs of matrices, q, k, v, probabilities)."""
        config = json.loads((drafter_dir / "config.json").read_text())
        nested = (config.get("transformer_layer_config", {}), config.get("dflash_config", {}))
        self.keys: dict[str, Any] = config | nested[0] | nested[1]
        self._causal, self._shift, self._norms_context = causal, position_shift, norms_context
        self._round = (lambda x: x.bfloat16().float()) if rounded else (lambda x: x)
        self._weights = _tensors(target_dir, ("model.embed_tokens.weight", "lm_head.weight"))
        embedding = self._weights.pop("model.embed_tokens.weight")
        self._weights = {"embed_tokens.weight": embedding, "lm_head.weight": embedding} | self._weights
        self._weights |= _tensors(drafter_dir)
        self.block_size: int = self.keys["block_size"]
        anchors = self.keys.get("sample_from_anchor", config["architectures"] == ["Qwen3DSparkModel"])
        self.first_slot = (0 if anchors else 1) if first_slot is None else first_slot
        self.num_places = self.block_size - self.first_slot

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose entering hidden rows it reads."""
        if "aux_hidden_state_layer_ids" in self.keys:
            return tuple(self.keys["aux_hidden_state_layer_ids"])
        return tuple(layer + 1 for layer in self.keys["target_layer_ids"])

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden rows of the target, side by side [n - 1, num_features] -> [n - 1, hidden_size]."""
        return self._norm(self._linear(hidden, "fc"), "hidden_norm")

    def hidden_rows(self, hidden: torch.Tensor, anchor: int) -> torch.Tensor:
        """hidden [n - 1, num_features] of positions 0 .. n - 2, anchor: the token at n - 1 -> rows of the block after
        the final norm [block_size, hidden_size]."""
        context, first = self.context(hidden), len(hidden)
        tokens = torch.tensor([anchor] + [self.keys["mask_token_id"]] * (self.block_size - 1))
        positions = torch.arange(first + self.block_size)
        positions[first:] += self._shift
        x = self._weights["embed_tokens.weight"][tokens] * self.keys.get("input_embedding_scale", 1.0)
        for i in range(self.keys["num_hidden_layers"]):
            name = f"layers.{i}"
            normed = self._norm(x, f"{name}.input_layernorm")
            of_layer = self._norm(context, f"{name}.input_layernorm") if self._norms_context else context
            inputs, finish = self._convolved(normed, f"{name}.attention_conv")
            x = x + finish(self._attention(inputs, of_layer, positions, i))
            inputs, finish = self._convolved(self._norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp_conv")
            gate = torch.nn.functional.silu(self._linear(inputs, f"{name}.mlp.gate_proj"))
            up = self._linear(inputs, f"{name}.mlp.up_proj")
            x = x + finish(self._linear(gate * up, f"{name}.mlp.down_proj"))
        return self._norm(x, "norm")

    def logits(self, hidden: torch.Tensor, anchor: int, drafts: Sequence[int]) -> torch.Tensor:
        """Logits [num_places, vocab_size] of each place, given the drafts before it (drafts[-1] of all is not read);
        -inf: never drafted. For a product law any drafts do."""
        rows = self.hidden_rows(hidden, anchor)[self.first_slot :]
        return self.walk(rows, [anchor, *drafts][: self.num_places])

    def walk(self, rows: torch.Tensor, previous: Sequence[int]) -> torch.Tensor:
        """rows of places [num_places, hidden_size], previous: the token before each -> logits."""
        w, cap = self._weights, self.keys.get("final_logit_softcapping") or 0.0
        raw = self._linear(rows, "lm_head")
        raw[:, self.keys["mask_token_id"]] = -torch.inf
        found = raw * self.keys.get("output_multiplier", 1.0)
        found = torch.tanh(found / cap) * cap if cap else found
        found[:, self.keys["mask_token_id"]] = -torch.inf
        before = torch.tensor(list(previous))
        if self.keys.get("markov_rank"):
            found = found + self._linear(w["markov_head.markov_w1.weight"][before], "markov_head.markov_w2")
        if "selector_top_k" in self.keys:
            best = raw.sort(dim=-1, descending=True, stable=True).indices[:, : self.keys["selector_top_k"]]
            state = self._linear(rows, "candidate_selector.hidden_projection")
            state = state * w["candidate_selector.predecessor_codebook"][before]
            scores = torch.einsum("pr,pkr->pk", state, w["candidate_selector.successor_codebook"][best])
            chosen = torch.full_like(found, -torch.inf)
            found = chosen.scatter(1, best, found.gather(1, best) + scores)
        return found

    def _attention(self, x: torch.Tensor, context: torch.Tensor, positions: torch.Tensor, i: int) -> torch.Tensor:
        name, head_dim = f"layers.{i}.self_attn", self.keys["head_dim"]
        both = torch.cat((context, x))
        q, k, v = (
            self._linear(rows, f"{name}.{part}_proj").view(len(rows), -1, head_dim)
            for rows, part in ((x, "q"), (both, "k"), (both, "v"))
        )
        q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        of_block = positions[-len(x) :]
        q, k, v = self._round(self._rotated(q, of_block)), self._round(self._rotated(k, positions)), self._round(v)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        window, causal = self._mask_of(i)
        distance = of_block[:, None] - positions
        unseen = distance >= window if window else torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            unseen = unseen | (distance < 0)
        scores = scores.masked_fill(unseen, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        attended = torch.einsum("hqk,khd->hqd", self._round(weights), v) / weights.sum(-1, keepdim=True)
        return self._linear(attended.transpose(0, 1).reshape(len(x), -1), f"{name}.o_proj")

    def _mask_of(self, i: int) -> tuple[int, bool]:
        slides = self.keys["layer_types"][i] == "sliding_attention"
        causal = self.keys.get("is_causal", slides and not self.keys.get("sliding_window_non_causal"))
        return (self.keys["sliding_window"] if slides else 0), causal if self._causal is None else self._causal

    def _convolved(self, x: torch.Tensor, name: str) -> tuple[torch.Tensor, Any]:
        """x after the convolution before a sublayer, and the one after it, whose taps x decides too."""
        if f"{name}.base_kernel" not in self._weights:
            return x, lambda y: y
        base = self._weights[f"{name}.base_kernel"]
        taps, size = base.shape[1], self.keys["conv_group_size"]
        deltas = self._linear(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1).repeat_interleave(size, -1)

        def convolve(y: torch.Tensor, side: int) -> torch.Tensor:
            found = torch.zeros_like(y)
            for tap in range(taps):
                shifted = torch.cat((torch.zeros(tap, y.shape[1]), y[: len(y) - tap]))
                found = found + (base[side, tap] + deltas[:, side, tap]) * shifted
            return found

        return convolve(x, 0), lambda y: convolve(y, 1)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        head_dim = x.shape[-1]
        theta = self.keys.get("rope_theta") or self.keys["rope_parameters"]["rope_theta"]
        angles = positions[:, None].float() * theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        low, high = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.keys["rms_norm_eps"])
        return x * scale * self._weights[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return torch.nn.functional.linear(self._round(x), weight, bias)


def _tensors(directory: Path, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """fp32 tensors of a checkpoint, of these names where there are any."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        there = file.keys()
        return {name: file.get_tensor(name).float() for name in there if not names or name in names}
