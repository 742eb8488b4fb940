"""Enlarge a model without changing its function: acceptance of a trained pair at the cost of a 1B, 8B or 32B model.

The function is the same, with trained hidden size h and larger hidden size H, because:

- The residual stream x becomes P x, P [H, h] with random orthonormal columns, so that the weights are dense. A norm's
weights are folded into the matrices after it, and mean(square(P x)) = h / H mean(square(x)): with an epsilon of
  h / H times the trained one, RMSNorm(P x) = sqrt(H / h) P RMSNorm(x), exactly.
- Heads, neurons and value dimensions are copied, and their outputs split among the copies, with random signs.
- A head of m times the size has the trained rotary pair i as its pair m i, which turns at the same frequency. The pairs
in between have zero keys; queries are multiplied by sqrt(m) to undo the change of score scale.
- Added layers are dense and cancel themselves: heads and neurons come in pairs that compute the same and are added with
opposite signs, up to rounding of a partial sum.
- Added tokens have the LM head's rows of trained ones, but for one dimension that no layer writes to. It carries a
constant c from the embedding to the LM head, and there takes LOGIT_GAP from an added token's logit at a hidden row of
twice the usual size, and more at a smaller one: none is ever the most probable, and 31 times as many as trained ones
  have together a probability of 1e-7. c^2 / H is taken out of the norms' epsilon, so that they compute what they did.

Only time and memory change; measurements on an enlarged model must say so. Needs torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import Dtype, Weights, converted, expected_shapes

if TYPE_CHECKING:
    from torch import Generator

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_ROPES = ("default", "linear", "llama3")  # frequencies depend only on a pair's relative position in the head
LOGIT_GAP = 20.0
NUM_PROBED_TOKENS = 128  # random tokens, to measure the size of the trained model's last hidden rows


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder that determine the cost of a pass. vocab_size: 0 for the trained one's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 0

    @property
    def layers(self) -> DecoderShape:
        """The shape with the trained vocabulary."""
        return dataclasses.replace(self, vocab_size=0)


SHAPES = {
    "0.1B": DecoderShape(768, 2048, 16, 12, 4, 64),
    "0.3B": DecoderShape(1024, 4096, 20, 16, 4, 64),
    "1B": DecoderShape(2048, 8192, 16, 32, 8, 64),  # Llama 3.2 1B
    "8B": DecoderShape(4096, 14336, 32, 32, 8, 128),  # Llama 3.1 8B
    "32B": DecoderShape(5120, 25600, 64, 64, 8, 128),  # Qwen3 32B, without its norms of queries and keys
}
# With Llama 3's vocabulary.
SHAPES |= {f"{name}-128k": dataclasses.replace(SHAPES[name], vocab_size=128_256) for name in ("0.3B", "8B")}


def enlarge_config(config: ModelConfig, shape: DecoderShape) -> ModelConfig:
    """Return the configuration of the larger model; InvalidArgumentError if this shape is not possible."""
    for name, bad in (
        ("qk_norm", config.qk_norm),
        ("qkv_bias", config.qkv_bias),
        ("o_bias", config.o_bias),
        ("mlp_bias", config.mlp_bias),
    ):
        if bad:
            raise InvalidArgumentError(
                f"{name} is true in a {config.architecture}, only models without can be enlarged"
            )
    if config.rope.rope_type not in _ROPES:
        raise InvalidArgumentError(f"rope_type is {config.rope.rope_type}; it must be one of {', '.join(_ROPES)}")
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads"):
        if getattr(shape, name) < getattr(config, name):
            raise InvalidArgumentError(
                f"{name} is {getattr(shape, name)}; it must be at least the trained model's {getattr(config, name)}"
            )
    if shape.head_dim % config.head_dim:
        raise InvalidArgumentError(
            f"head_dim is {shape.head_dim}; it must be a multiple of the trained model's {config.head_dim}"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise InvalidArgumentError(
            f"num_heads is {shape.num_heads}; it must be a multiple of num_kv_heads, {shape.num_kv_heads}"
        )
    fewest = shape.num_kv_heads // config.num_kv_heads * (shape.num_heads // shape.num_kv_heads)
    group = config.num_heads // config.num_kv_heads
    if fewest < group:
        raise InvalidArgumentError(
            f"num_heads is {shape.num_heads}, it leaves {fewest} for the {group} query heads of a trained KV head"
        )
    vocab_size = shape.vocab_size or config.vocab_size
    if vocab_size < config.vocab_size:
        raise InvalidArgumentError(
            f"vocab_size is {vocab_size}; it must be at least the trained model's {config.vocab_size}, or 0 for that"
        )
    epsilon = config.rms_norm_eps * config.hidden_size
    if vocab_size > config.vocab_size:
        if shape.hidden_size == config.hidden_size:
            raise InvalidArgumentError(
                f"hidden_size is {shape.hidden_size}; it must be more than the trained model's for vocab_size "
                f"{vocab_size}: added tokens need a dimension of their own"
            )
        epsilon -= _constant(config) ** 2
    return dataclasses.replace(
        config,
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        windows=config.windows[:1] * shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=epsilon / shape.hidden_size,
        tie_word_embeddings=False,
    )


def _constant(config: ModelConfig) -> float:
    """Return the constant c of added tokens: a power of two, exact in bf16, whose square fits into the epsilon."""
    if not config.rms_norm_eps > 0:
        raise InvalidArgumentError("rms_norm_eps is 0; it must be more for a larger vocabulary")
    return 2.0 ** math.floor(math.log2(config.rms_norm_eps * config.hidden_size) / 2)


def num_matrix_parameters(config: ModelConfig) -> int:
    """Return the number of entries in matrices of the layers and the LM head."""
    shapes = expected_shapes(dataclasses.replace(config, tie_word_embeddings=False))
    return sum(math.prod(s) for name, s in shapes.items() if len(s) == 2 and name != "model.embed_tokens.weight")


class EnlargedWeights(Weights):
    """Tensors of the larger model, made one at a time; tensor() returns torch's.

    The same seed gives the same model on the same kind of device; devices differ only in the added layers, which have
    no effect. Not thread-safe.
    """

    def __init__(
        self, weights: Weights, config: ModelConfig, shape: DecoderShape, seed: int = 0, device: str = "cpu"
    ) -> None:
        import torch

        self.config = enlarge_config(config, shape)
        self._weights, self._trained, self._seed, self._device = weights, config, seed, device
        self._shapes = expected_shapes(self.config)
        self._trained_shapes = expected_shapes(config)
        ratio = shape.num_layers / config.num_layers
        self._layers = {math.ceil(i * ratio): i for i in range(config.num_layers)}
        self._token = np.arange(self.config.vocab_size) % config.vocab_size
        self._is_padded = self._token.size > config.vocab_size
        size = shape.hidden_size - self._is_padded  # the last dimension is the added tokens'
        noise = torch.randn(size, config.hidden_size, dtype=torch.float64, generator=self._rng("rotation"))
        rotation = torch.linalg.qr(noise)[0].float()
        self._rotation = torch.nn.functional.pad(rotation, (0, 0, 0, int(self._is_padded))).to(device)
        self._norm_scale = math.sqrt(config.hidden_size / shape.hidden_size)
        self._heads = _HeadMap(config, shape)
        self._neuron = np.arange(shape.intermediate_size) % config.intermediate_size
        self._neuron_share = _shares(self._neuron)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; CheckpointError if the larger model has none of this name."""
        if name not in self._shapes:
            raise CheckpointError(f"tensor {name} is not one of the enlarged model's")
        return self._shapes[name]

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        return converted(self.tensor(name).cpu().numpy(), dtype)

    def tensor(self, name: str) -> Any:
        """Return the tensor as torch's, fp32 on the device."""
        import torch

        shape = self.shape(name)
        if len(shape) == 1:  # norms are folded into the next matrices
            return torch.ones(shape, device=self._device)
        if name == "model.embed_tokens.weight":
            rows = self._of_tokens(self._read(name) @ self._rotation.T)
            if self._is_padded:
                rows[:, -1] = _constant(self._trained)
            return rows
        if name == "lm_head.weight":
            tied = self._trained.tie_word_embeddings
            head = self._read("model.embed_tokens.weight" if tied else name)
            rows = self._of_tokens(self._after_norm(head, "model.norm.weight"))
            if self._is_padded:
                rows[self._trained.vocab_size :, -1] = -self._penalty()
            return rows
        match = _LAYER_NAME.fullmatch(name)
        assert match is not None
        index, part = int(match[1]), match[2].rpartition(".")[2]
        if index in self._layers:
            return self._trained_layer(index, part)
        return self._added_layer(index, part)

    def _trained_layer(self, index: int, part: str) -> Any:
        import torch

        old, new, heads = self._trained, self.config, self._heads
        layer = f"model.layers.{self._layers[index]}"
        signs = self._signs(index, "v", (new.num_kv_heads, new.head_dim))
        neuron_signs = self._signs(index, "up", (new.intermediate_size,))
        if part in ("q_proj", "k_proj", "v_proj"):
            rows = self._after_norm(self._read(f"{layer}.self_attn.{part}.weight"), f"{layer}.input_layernorm.weight")
            rows = rows.view(-1, old.head_dim, new.hidden_size)
            if part == "v_proj":
                return (rows[heads.kv].repeat(1, heads.scale, 1) * signs[:, :, None]).flatten(0, 1)
            if part == "k_proj":
                wide = torch.zeros(new.num_kv_heads, new.head_dim, new.hidden_size, device=self._device)
                wide[:, heads.dims] = rows[heads.kv]
                return wide.flatten(0, 1)
            # Queries outside the trained pairs meet zero keys, so they can be arbitrary.
            wide = self._noise(index, part, (new.num_heads, new.head_dim, new.hidden_size)) * rows.std()
            wide[:, heads.dims] = rows[heads.q] * math.sqrt(heads.scale)
            return wide.flatten(0, 1)
        if part == "o_proj":
            columns = (self._rotation @ self._read(f"{layer}.self_attn.o_proj.weight")).view(
                -1, old.num_heads, old.head_dim
            )
            wide = columns[:, heads.q].repeat(1, 1, heads.scale)
            wide *= self._floats(heads.q_share)[:, None] / heads.scale
            wide *= signs.repeat_interleave(new.num_heads // new.num_kv_heads, 0)
            return wide.flatten(1, 2)
        if part == "down_proj":
            columns = self._rotation @ self._read(f"{layer}.mlp.down_proj.weight")
            return columns[:, self._neuron] * (self._floats(self._neuron_share) * neuron_signs)
        rows = self._after_norm(self._read(f"{layer}.mlp.{part}.weight"), f"{layer}.post_attention_layernorm.weight")
        return rows[self._neuron] * neuron_signs[:, None] if part == "up_proj" else rows[self._neuron]

    def _added_layer(self, index: int, part: str) -> Any:
        """Return random matrices of the usual scale; pairs of heads and neurons cancel in o_proj and down_proj."""
        new = self.config
        group, scale = new.num_heads // new.num_kv_heads, new.hidden_size**-0.5
        pairs_kv = group % 2 == 1  # pair two KV heads, else two query heads of one KV head
        if part in ("q_proj", "k_proj", "v_proj"):
            num_heads = new.num_heads if part == "q_proj" else new.num_kv_heads
            heads = self._noise(index, part, (num_heads, new.head_dim, new.hidden_size)) * scale
            if pairs_kv:
                heads = heads.view(new.num_kv_heads, -1, new.head_dim, new.hidden_size)
            if pairs_kv or part == "q_proj":
                heads[1::2] = heads[0 : len(heads) // 2 * 2 : 2]
            return heads.reshape(-1, new.hidden_size)
        if part == "o_proj":
            size = new.head_dim * (group if pairs_kv else 1)  # of a paired block
            return self._cancelling_columns(index, part, new.num_heads * new.head_dim, size)
        if part == "down_proj":
            return self._cancelling_columns(index, part, new.intermediate_size, 1)
        rows = self._noise(index, part, (new.intermediate_size, new.hidden_size)) * scale
        rows[1::2] = rows[0 : len(rows) // 2 * 2 : 2]
        return rows

    def _cancelling_columns(self, index: int, part: str, num_columns: int, size: int) -> Any:
        """Return blocks of `size` columns in pairs of opposite sign; a block without a partner is zero."""
        columns = self._noise(index, part, (self.config.hidden_size, num_columns // size, size)) * num_columns**-0.5
        paired = columns.shape[1] // 2 * 2
        columns[:, 1:paired:2] = -columns[:, 0:paired:2]
        columns[:, paired:] = 0
        if self._is_padded:
            columns[-1] = 0
        return columns.flatten(1, 2)

    def _of_tokens(self, rows: Any) -> Any:
        """Extend rows of the trained tokens to all tokens, with different rows."""
        return rows[self._token] if self._is_padded else rows

    def _penalty(self) -> float:
        """Return the weight that subtracts LOGIT_GAP from a logit for a last hidden row of twice the usual size."""
        tokens = np.random.default_rng(self._seed).integers(0, self._trained.vocab_size, NUM_PROBED_TOKENS)
        rows = ReferenceModel(self._trained, self._weights).hidden_rows(tokens.tolist())[-1]
        usual = float((rows.square().mean(1) + self._trained.rms_norm_eps).sqrt().median())
        return LOGIT_GAP * 2 * usual * self._norm_scale / _constant(self._trained)

    def _read(self, name: str) -> Any:
        import torch

        return torch.from_numpy(self._weights.float32(name, self._trained_shapes[name])).to(self._device)

    def _after_norm(self, matrix: Any, norm: str) -> Any:
        """Convert a matrix [out, h] of a norm's output to [out, H], with the norm's weights folded in."""
        return (matrix * self._read(norm) * self._norm_scale) @ self._rotation.T

    def _floats(self, values: npt.NDArray[np.float64]) -> Any:
        import torch

        return torch.from_numpy(values.astype(np.float32)).to(self._device)

    def _signs(self, index: int, what: str, shape: tuple[int, ...]) -> Any:
        import torch

        bits = torch.randint(0, 2, shape, generator=self._rng(f"signs/{index}/{what}"))
        return (2 * bits - 1).float().to(self._device)

    def _noise(self, index: int, part: str, shape: tuple[int, ...]) -> Any:
        import torch

        return torch.randn(shape, generator=self._rng(f"noise/{index}/{part}", self._device), device=self._device)

    def _rng(self, key: str, device: str = "cpu") -> Generator:
        import torch

        words = np.random.SeedSequence([self._seed, *key.encode()]).generate_state(2)
        return torch.Generator(device).manual_seed(int(words[0]) << 31 ^ int(words[1]))


class _HeadMap:
    """The trained head that each head copies: kv [num_kv_heads], q [num_heads]; q_share: share of its output.

    scale: head size over the trained one. dims [trained head_dim]: positions of its dimensions in q and k.
    """

    def __init__(self, old: ModelConfig, new: DecoderShape) -> None:
        group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
        self.kv = np.arange(new.num_kv_heads) % old.num_kv_heads
        copy = np.arange(new.num_kv_heads) // old.num_kv_heads
        place = copy[:, None] * new_group + np.arange(new_group)  # among the query heads of all copies of a KV head
        self.q = (self.kv[:, None] * group + place % group).ravel()
        self.q_share = _shares(self.q)
        self.scale = new.head_dim // old.head_dim
        pairs = self.scale * np.arange(old.head_dim // 2)
        self.dims = np.concatenate([pairs, pairs + new.head_dim // 2])


def _shares(sources: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return 1 / (number of copies of its source) per copy."""
    shares: npt.NDArray[np.float64] = 1.0 / np.bincount(sources)[sources]
    return shares


@functools.cache
def shape_named(name: str) -> DecoderShape:
    """Return a shape of SHAPES; InvalidArgumentError lists them."""
    if name not in SHAPES:
        raise InvalidArgumentError(f"shape {name} is unknown, there are {', '.join(SHAPES)}")
    return SHAPES[name]
