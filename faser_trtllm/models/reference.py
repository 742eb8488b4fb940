"""A reference model in plain torch: float32, whole sequences, no KV cache. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.experts import CLAMPED, GATE_ALPHA, GATE_LIMIT, SOFTMAX, TOP_K_SOFTMAX, ExpertsConfig
from faser_trtllm.models.rope import rope_frequencies
from faser_trtllm.models.weights import Weights, expected_shapes, float32_from_bfloat16

if TYPE_CHECKING:
    import torch


class ReferenceModel:
    """A model in fp32 for tests, measurements and calibration, not for serving.

    Subclasses may override linear() to observe or change the products.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, round_to_bf16: bool = False, is_streamed: bool = False
    ) -> None:
        """Load the weights.

        round_to_bf16: round matrices (not norms and biases) to bf16 first, as the engine file does.
        is_streamed: read each tensor whenever it is used, for models larger than memory; weights must stay open.
        """
        import torch

        self.config = config
        self._shapes = expected_shapes(config)
        self._source = weights
        self._round_to_bf16 = round_to_bf16
        self._kept: dict[str, torch.Tensor] = {}
        if not is_streamed:
            self._kept = {name: self._read(name) for name in self._shapes}
        inv_freq, self._rope_factor = rope_frequencies(config.rope, config.head_dim)
        self._inv_freq = torch.from_numpy(inv_freq)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return logits [len(token_ids), vocab_size] fp32 of one sequence from position 0."""
        import torch

        with torch.no_grad():
            hidden = self._norm("model.norm", self.hidden_rows(token_ids)[-1])
            head = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
            return hidden @ self._weight(head).T

    def hidden_rows(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        """Return each layer's input and then the last layer's output, fp32 [len(token_ids), hidden_size] each."""
        import torch

        config = self.config
        with torch.no_grad():
            positions = torch.arange(len(token_ids))
            angles = torch.outer(positions.float(), self._inv_freq)
            angles = torch.cat([angles, angles], -1)
            cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
            distance = positions[:, None] - positions[None, :]
            masks = {w: (distance >= 0) & (distance < (w or len(token_ids))) for w in set(config.windows)}
            rows = [self._weight("model.embed_tokens.weight")[torch.tensor(token_ids)]]
            for i in range(config.num_layers):
                layer = f"model.layers.{i}"
                hidden = rows[-1] + self._attention(layer, rows[-1], cos, sin, masks[config.windows[i]])
                rows.append(hidden + self._mlp(layer, hidden))
            return rows

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [rows, in] by the matrix of this name (without .weight) and add its bias: [rows, out]."""
        return self.add_bias(name, x @ self._weight(f"{name}.weight").T)

    def add_bias(self, name: str, y: torch.Tensor) -> torch.Tensor:
        """Add the bias of a matrix, if the model has one, to y [rows, out]."""
        return y + self._weight(f"{name}.bias") if f"{name}.bias" in self._shapes else y

    def _read(self, name: str) -> torch.Tensor:
        import torch

        shape = self._shapes[name]
        if self._round_to_bf16 and len(shape) == 2:
            return torch.from_numpy(float32_from_bfloat16(self._source.bfloat16(name, shape)))
        return torch.from_numpy(self._source.float32(name, shape))

    def _weight(self, name: str) -> torch.Tensor:
        return self._kept[name] if name in self._kept else self._read(name)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self._weight(f"{name}.weight") * (x * (variance + self.config.rms_norm_eps).rsqrt())

    def _attention(
        self, layer: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        import torch

        config = self.config
        x = self._norm(f"{layer}.input_layernorm", x)
        heads = {part: self.linear(f"{layer}.self_attn.{part}_proj", x) for part in "qkv"}
        for part, values in heads.items():
            is_normed = config.qk_norm and part != "v"
            if is_normed and config.norms_all_heads:
                values = self._norm(f"{layer}.self_attn.{part}_norm", values)
            heads[part] = values.view(len(x), -1, config.head_dim)
            if is_normed and not config.norms_all_heads:
                heads[part] = self._norm(f"{layer}.self_attn.{part}_norm", heads[part])

        def rotate(t: torch.Tensor) -> torch.Tensor:
            first, second = t.chunk(2, -1)
            return t * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

        group = config.num_heads // config.num_kv_heads
        q = rotate(heads["q"]).transpose(0, 1)
        k = rotate(heads["k"]).repeat_interleave(group, 1).transpose(0, 1)
        v = heads["v"].repeat_interleave(group, 1).transpose(0, 1)
        scores = (q @ k.transpose(1, 2)) * config.head_dim**-0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        if config.has_sinks:
            sinks = self._weight(f"{layer}.self_attn.sinks")[:, None, None]
            scores = torch.cat([scores, sinks.expand(-1, len(x), 1)], -1)
        probs = scores.softmax(-1)[..., : len(x)]
        mixed = (probs @ v).transpose(0, 1).reshape(len(x), -1)
        return self.linear(f"{layer}.self_attn.o_proj", mixed)

    def _mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        import torch

        x = self._norm(f"{layer}.post_attention_layernorm", x)
        experts = self.config.experts
        if experts is None:
            return self._gated(f"{layer}.mlp", x)
        chosen, weights = routes(experts, self.linear(f"{layer}.mlp.gate", x))
        found = torch.zeros_like(x)
        for i in sorted(set(chosen.flatten().tolist())):  # engines add a row's terms in this order
            rows, places = (chosen == i).nonzero(as_tuple=True)
            found[rows] += self._gated(f"{layer}.mlp.experts.{i}", x[rows]) * weights[rows, places, None]
        if experts.shared_size:
            share = self.linear(f"{layer}.mlp.shared_expert_gate", x).sigmoid()
            found += share * self._gated(f"{layer}.mlp.shared_expert", x)
        return found

    def _gated(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Apply gate_proj, up_proj, the activation and down_proj of one MLP."""
        import torch

        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        if self.config.experts is not None and self.config.experts.activation == CLAMPED:
            gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)
            return self.linear(f"{name}.down_proj", (up + 1) * (gate * (GATE_ALPHA * gate).sigmoid()))
        return self.linear(f"{name}.down_proj", torch.nn.functional.silu(gate) * up)


def routes(experts: ExpertsConfig, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's experts (int64) and weights (fp32), [rows, top_k], from logits [rows, num_experts] fp32.

    Experts are sorted by descending score; of equal scores the lowest index comes first.
    """
    scores = logits.softmax(-1) if experts.scoring == SOFTMAX else logits
    found = scores.sort(dim=-1, descending=True, stable=True)
    weights, chosen = found.values[:, : experts.top_k], found.indices[:, : experts.top_k]
    if experts.scoring == TOP_K_SOFTMAX:
        weights = weights.softmax(-1)
    elif experts.norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights
