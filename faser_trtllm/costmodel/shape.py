"""Models as the cost model sees them: the sizes of what one GPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig, load_model_config

NUM_GPUS = (1, 4)  # tensor parallel: the anchors have all-reduces of 4 GPUs
EAGLE3_VOCAB = 32_000  # an EAGLE-3 head draws from a part of the vocabulary


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder. Sizes of the whole model; num_gpus share its matrices and its KV heads evenly.

    weight_bytes, kv_bytes: per value, 2 or (fp8) 1. tied: the embedding is the LM head.
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

    @property
    def layer_params(self) -> float:
        """Parameters of one layer's matrices, per GPU."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return (attention + 3 * self.hidden_size * self.intermediate_size) / self.num_gpus

    @property
    def head_params(self) -> float:
        """Parameters of the LM head, per GPU."""
        return self.vocab_size * self.hidden_size / self.num_gpus

    @property
    def pass_gb(self) -> float:
        """Weights that one pass reads on one GPU."""
        return 1e-9 * (self.num_layers * self.layer_params * self.weight_bytes + 2 * self.head_params)

    @property
    def resident_gb(self) -> float:
        """Weights in the memory of one GPU; the embedding is kept whole."""
        return self.pass_gb + (0.0 if self.tied else 2e-9 * self.vocab_size * self.hidden_size)

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
        """GFLOP of one row in the matrices, per GPU."""
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
        if self.num_kv_heads % num_gpus:
            raise InvalidArgumentError(
                f"num_gpus is {num_gpus}, but {self.name} has {self.num_kv_heads} KV heads, which do not divide "
                "evenly; take fewer GPUs"
            )
        return replace(self, num_gpus=num_gpus)

    def in_fp8(self) -> ModelShape:
        """Layers and KV cache in fp8; the LM head stays."""
        return replace(self, weight_bytes=1, kv_bytes=1)

    def eagle3(self) -> ModelShape:
        """The EAGLE-3 head of this target: one layer of its size on one GPU, in bf16."""
        return replace(
            self,
            name=f"eagle3 of {self.name}",
            num_layers=1,
            vocab_size=min(EAGLE3_VOCAB, self.vocab_size),
            tied=False,
            num_gpus=1,
            weight_bytes=2,
            kv_bytes=2,
        )

    @staticmethod
    def of(name: str, config: ModelConfig) -> ModelShape:
        """The shape of a checkpoint's configuration."""
        return ModelShape(
            name,
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.tie_word_embeddings,
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
