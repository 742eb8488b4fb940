"""Models as the cost model sees them: the sizes of what one GPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.experts import TOP_K_SOFTMAX

NUM_GPUS = (1, 4)  # tensor parallel: the anchors have all-reduces of 4 GPUs
EAGLE3_VOCAB = 32_000  # an EAGLE-3 head draws from a part of the vocabulary
DENSE_WIDTH = 3  # times the hidden size, of the MLP of a mixture's drafters, as published for Qwen3-30B-A3B
BLOCK_LAYERS, BLOCK_SIZE, BLOCK_FEATURES = 5, 16, 5  # of published block drafters; features: layers of the target read
MXFP4 = 4.25 / 8  # bytes of a weight: 32 of 4 bits share a scale of 8


@dataclass(frozen=True)
class Experts:
    """The experts of every layer of a mixture. intermediate_size: of one. value_bytes: of a weight, 2, 1 (fp8) or
    MXFP4."""

    routing: Routing
    intermediate_size: int
    value_bytes: float = 2.0


@dataclass(frozen=True)
class ModelShape:
    """A decoder. Sizes of the whole model; num_gpus share its matrices and its KV heads evenly.

    weight_bytes, kv_bytes: per value, 2 or (fp8) 1. tied: the embedding is the LM head. experts: of a mixture, whose
    intermediate_size is that of what every row takes next to them, 0 if there is nothing. block_size: rows of a block
    drafter's blocks, whose embedding and LM head are its target's; 0: it is none. is_head: it drafts from its target's
    hidden rows. windowed_share: of the layers, attends to the last `window` tokens only.
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
        """Parameters of one layer's matrices that every row takes, per GPU."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        router = self.hidden_size * self.experts.routing.num_experts if self.experts else 0
        return (attention + router + 3 * self.hidden_size * self.intermediate_size) / self.num_gpus

    @property
    def expert_params(self) -> float:
        """Parameters of one expert of one layer; 0 without experts."""
        return 3.0 * self.hidden_size * self.experts.intermediate_size if self.experts else 0.0

    @property
    def expert_gb(self) -> float:
        """One expert of every layer."""
        return 1e-9 * self.num_layers * self.expert_params * (self.experts.value_bytes if self.experts else 0.0)

    @property
    def head_params(self) -> float:
        """Parameters of the LM head, per GPU."""
        return self.vocab_size * self.hidden_size / self.num_gpus

    @property
    def dense_gb(self) -> float:
        """Weights that every pass reads on one GPU."""
        return 1e-9 * (self.num_layers * self.layer_params * self.weight_bytes + 2 * self.head_params)

    @property
    def pass_gb(self) -> float:
        """Weights that a pass of one row reads on one GPU."""
        return self.dense_gb + (self.experts.routing.top_k * self.expert_gb if self.experts else 0.0)

    @property
    def resident_gb(self) -> float:
        """Weights in the memory of one GPU, all experts among them; the embedding is kept whole."""
        if self.block_size:
            return self.dense_gb - 2e-9 * self.head_params + self.context_gb
        experts_gb = self.experts.routing.num_experts * self.expert_gb if self.experts else 0.0
        return self.dense_gb + experts_gb + (0.0 if self.tied else 2e-9 * self.vocab_size * self.hidden_size)

    @property
    def context_gb(self) -> float:
        """Weights that make keys and values of the target's hidden rows, for a block drafter."""
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
        """GFLOP of one row in the matrices that every row takes, per GPU."""
        return 2e-9 * (self.num_layers * self.layer_params + self.head_params)

    @property
    def gflop_per_attended(self) -> float:
        """GFLOP of a row's attention to one token in all layers, per GPU."""
        return 4e-9 * self.num_layers * self.num_heads * self.head_dim / self.num_gpus

    def on(self, num_gpus: int) -> ModelShape:
        """Tensor parallel over so many GPUs; InvalidArgumentError for a number without anchors."""
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
        """Layers and KV cache in fp8; the LM head stays, and so do experts in fewer bits."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, value_bytes=min(1.0, experts.value_bytes))
        return replace(self, weight_bytes=1, kv_bytes=1, experts=experts)

    def with_overlap(self, overlap: float) -> ModelShape:
        """Of two rows of a request, of a mixture's experts; InvalidArgumentError where that means nothing."""
        if not 0.0 <= overlap < 1.0:
            raise InvalidArgumentError(
                f"expert_overlap is {overlap}, it must be at least 0 and less than 1: the share of a row's experts "
                "that another row of its request takes too"
            )
        if self.experts is None:
            raise InvalidArgumentError(f"expert_overlap is {overlap}, but {self.name} has no experts; leave it out")
        routing = replace(self.experts.routing, overlap=overlap)
        return replace(self, experts=replace(self.experts, routing=routing))

    def eagle3(self) -> ModelShape:
        """The EAGLE-3 head of this target: one dense layer of its size on one GPU, in bf16."""
        return self._drafter("eagle3", num_layers=1, vocab_size=min(EAGLE3_VOCAB, self.vocab_size))

    def block_drafter(self) -> ModelShape:
        """The block drafter of this target: dense layers of its size on one GPU, in bf16, with its LM head."""
        return self._drafter("block drafter", num_layers=BLOCK_LAYERS, block_size=BLOCK_SIZE)

    def _drafter(self, kind: str, **sizes: Any) -> ModelShape:
        width = DENSE_WIDTH * self.hidden_size if self.experts is not None else self.intermediate_size
        dense = replace(self, name=f"{kind} of {self.name}", intermediate_size=width, experts=None, tied=False)
        plain = replace(dense, num_gpus=1, weight_bytes=2, kv_bytes=2, window=0, windowed_share=0.0)
        return replace(plain, is_head=True, **sizes)

    @staticmethod
    def of(name: str, config: ModelConfig) -> ModelShape:
        """The shape of a checkpoint's configuration. gpt-oss's experts are in MXFP4."""
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
    """A built-in name, or a checkpoint's directory with a config.json; InvalidArgumentError for neither."""
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
