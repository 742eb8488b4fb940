"""Model shapes for the cost model: sizes of the part that one GPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.experts import TOP_K_SOFTMAX

NUM_GPUS = (1, 4)  # tensor parallel: the anchors have all-reduces of 4 GPUs
EAGLE3_VOCAB = 32_000  # tokens that an EAGLE-3 head can draft
DENSE_WIDTH = 3  # MLP width over hidden size in a mixture's drafters, as published for Qwen3-30B-A3B
BLOCK_LAYERS, BLOCK_SIZE, BLOCK_FEATURES = (
    5,
    16,
    5,
)  # of published block drafters; features: the target's layers that are read
MXFP4 = 4.25 / 8  # bytes per weight: 32 weights of 4 bits share a scale of 8


@dataclass(frozen=True)
class Experts:
    """A mixture's experts. intermediate_size: width of one. value_bytes: per weight, 2, 1 (fp8) or MXFP4."""

    routing: Routing
    intermediate_size: int
    value_bytes: float = 2.0


@dataclass(frozen=True)
class ModelShape:
    """A decoder. Sizes are the whole model's; num_gpus share its matrices and KV heads evenly.

    intermediate_size: width of the MLP, or with experts of the part that every row uses, 0 for none.
    weight_bytes, kv_bytes: per value, 2 or (fp8) 1. tied: the embedding is the LM head.
    block_size: rows of a block drafter's blocks, whose embedding and LM head are its target's; 0 for other models.
    is_head: it drafts from its target's hidden rows.
    windowed_share: share of the layers that attend to the last `window` tokens only.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    num_gpus: int = 1
    weight_bytes: int = 2
    kv_bytes: int = 2
    experts: Experts | None = None
    block_size: int = 0
    is_head: bool = False
    window: int = 0
    windowed_share: float = 0.0

    @property
    def layer_params(self) -> float:
        """Parameters of one layer's dense matrices, per GPU."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        router = self.hidden_size * self.experts.routing.num_experts if self.experts else 0
        return (attention + router + 3 * self.hidden_size * self.intermediate_size) / self.num_gpus

    @property
    def expert_params(self) -> float:
        """Parameters of one expert of one layer; 0 without experts."""
        return 3.0 * self.hidden_size * self.experts.intermediate_size if self.experts else 0.0

    @property
    def expert_gb(self) -> float:
        """GB of one expert in every layer."""
        return 1e-9 * self.num_layers * self.expert_params * (self.experts.value_bytes if self.experts else 0.0)

    @property
    def head_params(self) -> float:
        """Parameters of the LM head, per GPU."""
        return self.vocab_size * self.hidden_size / self.num_gpus

    @property
    def dense_gb(self) -> float:
        """GB of weights that every pass reads on one GPU."""
        return 1e-9 * (self.num_layers * self.layer_params * self.weight_bytes + 2 * self.head_params)

    @property
    def pass_gb(self) -> float:
        """GB of weights that a pass of one row reads on one GPU."""
        return self.dense_gb + (self.experts.routing.top_k * self.expert_gb if self.experts else 0.0)

    @property
    def resident_gb(self) -> float:
        """GB of weights in the memory of one GPU, with all experts; the embedding is not split."""
        if self.block_size:
            return self.dense_gb - 2e-9 * self.head_params + self.context_gb
        experts_gb = self.experts.routing.num_experts * self.expert_gb if self.experts else 0.0
        return self.dense_gb + experts_gb + (0.0 if self.tied else 2e-9 * self.vocab_size * self.hidden_size)

    @property
    def context_gb(self) -> float:
        """GB of weights with which a block drafter turns the target's hidden rows into keys and values."""
        features = BLOCK_FEATURES * self.hidden_size**2
        return 2e-9 * (features + self.num_layers * self.hidden_size * 2 * self.num_kv_heads * self.head_dim)

    @property
    def layer_kv_bytes(self) -> float:
        """Bytes of one token in one layer's cache, per GPU."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_bytes / self.num_gpus

    @property
    def token_gb(self) -> float:
        """GB of one token's cache, per GPU."""
        return 1e-9 * self.num_layers * self.layer_kv_bytes

    @property
    def gflop_per_row(self) -> float:
        """GFLOP of one row in the dense matrices, per GPU."""
        return 2e-9 * (self.num_layers * self.layer_params + self.head_params)

    @property
    def gflop_per_attended(self) -> float:
        """GFLOP of a row's attention to one token in all layers, per GPU."""
        return 4e-9 * self.num_layers * self.num_heads * self.head_dim / self.num_gpus

    def on(self, num_gpus: int) -> ModelShape:
        """Return the model on num_gpus (tensor parallelism); InvalidArgumentError for a number without anchors."""
        if num_gpus not in NUM_GPUS:
            raise InvalidArgumentError(
                f"num_gpus is {num_gpus}, the cost model has all-reduces of {NUM_GPUS[-1]} GPUs only; "
                f"take {' or '.join(map(str, NUM_GPUS))}"
            )
        if self.experts is not None and num_gpus > 1:
            raise InvalidArgumentError(
                f"num_gpus is {num_gpus}, but {self.name} is a mixture of experts, for which the cost model has "
                "operators of one GPU only; take 1"
            )
        if self.num_kv_heads % num_gpus:
            raise InvalidArgumentError(
                f"num_gpus is {num_gpus}, but {self.name} has {self.num_kv_heads} KV heads, which do not divide "
                "evenly; take fewer GPUs"
            )
        return replace(self, num_gpus=num_gpus)

    def in_fp8(self) -> ModelShape:
        """Return the model with layers and KV cache in fp8; the LM head and experts in fewer bits stay."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, value_bytes=min(1.0, experts.value_bytes))
        return replace(self, weight_bytes=1, kv_bytes=1, experts=experts)

    def with_overlap(self, overlap: float) -> ModelShape:
        """Return the mixture with this overlap of experts of two rows of a request; InvalidArgumentError if invalid."""
        if not 0.0 <= overlap < 1.0:
            raise InvalidArgumentError(
                f"expert_overlap is {overlap}; it must be at least 0 and less than 1: the share of a row's experts "
                "that another row of its request takes too"
            )
        if self.experts is None:
            raise InvalidArgumentError(f"expert_overlap is {overlap}, but {self.name} has no experts; leave it out")
        routing = replace(self.experts.routing, overlap=overlap)
        return replace(self, experts=replace(self.experts, routing=routing))

    def eagle3(self) -> ModelShape:
        """Return the target's EAGLE-3 head: one dense layer of its size on one GPU, in bf16."""
        return self._drafter("eagle3", num_layers=1, vocab_size=min(EAGLE3_VOCAB, self.vocab_size))

    def block_drafter(self) -> ModelShape:
        """Return the target's block drafter: dense layers of its size on one GPU, in bf16, with its LM head."""
        return self._drafter("block drafter", num_layers=BLOCK_LAYERS, block_size=BLOCK_SIZE)

    def _drafter(self, kind: str, **sizes: Any) -> ModelShape:
        width = DENSE_WIDTH * self.hidden_size if self.experts is not None else self.intermediate_size
        dense = replace(self, name=f"{kind} of {self.name}", intermediate_size=width, experts=None, tied=False)
        plain = replace(dense, num_gpus=1, weight_bytes=2, kv_bytes=2, window=0, windowed_share=0.0)
        return replace(plain, is_head=True, **sizes)

    @staticmethod
    def of(name: str, config: ModelConfig) -> ModelShape:
        """Return the shape of a checkpoint's configuration. gpt-oss's experts are in MXFP4."""
        experts, found = None, config.experts
        if found is not None:
            value_bytes = MXFP4 if found.scoring == TOP_K_SOFTMAX else 2.0
            experts = Experts(Routing(found.num_experts, found.top_k), found.intermediate_size, value_bytes)
        return ModelShape(
            name,
            config.num_layers,
            config.hidden_size,
            config.intermediate_size if found is None else found.shared_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.tie_word_embeddings,
            experts=experts,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-13b", 40, 5120, 13824, 40, 40, 128, 32000),
        ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        ModelShape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
        ModelShape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, tied=True),
        ModelShape("llama-3.3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
        ModelShape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, tied=True),
        ModelShape("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, tied=True),
        ModelShape("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151936, tied=True),
        ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
        ModelShape("qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936),
        ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936),
        ModelShape("qwen3-30b-a3b", 48, 2048, 0, 32, 4, 128, 151936, experts=Experts(Routing(128, 8), 768)),
        ModelShape("mixtral-8x7b", 32, 4096, 0, 32, 8, 128, 32000, experts=Experts(Routing(8, 2), 14336)),
        *(
            ModelShape(name, num_layers, 2880, 0, 64, 8, 64, 201088, experts=experts, window=128, windowed_share=0.5)
            for name, num_layers, experts in (
                ("gpt-oss-20b", 24, Experts(Routing(32, 4), 2880, MXFP4)),
                ("gpt-oss-120b", 36, Experts(Routing(128, 4), 2880, MXFP4)),
            )
        ),
    )
}


def find_shape(name: str) -> ModelShape:
    """Return the shape of a built-in name or a checkpoint directory; InvalidArgumentError for neither."""
    found = SHAPES.get(name.lower())
    if found is not None:
        return found
    path = Path(name)
    if not (path / "config.json").is_file():
        raise InvalidArgumentError(
            f"model is {name!r}, which is neither a directory with a config.json nor one of {', '.join(SHAPES)}; "
            "give the checkpoint's directory"
        )
    return ModelShape.of(path.resolve().name, load_model_config(path))
