"""Matrices of AWQ and GPTQ checkpoints, dequantized on demand.

Both store, for a matrix X [out, in], 4- or 8-bit integers in int32 words as X.qweight, zero points as X.qzeros
[groups, out / per word] and scales as X.scales [groups, out]; a weight is (integer - zero point) * scale, exact in
fp32.

AWQ ("gemm", github.com/casper-hansen/AutoAWQ): qweight [in, out / 8]; the words of qweight and qzeros hold outputs
0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
GPTQ (github.com/AutoGPTQ/AutoGPTQ): qweight [in / per word, out], inputs in order; qzeros hold outputs in order, one
less than the zero point in the first format; X.g_idx [in], where it exists, names the group of each input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.checkpoint.quantization import QuantizationConfig
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.fp8 import Float32Array
from faser_trtllm.models.weights import CheckpointWeights, Dtype, Weights, converted, expected_shapes

_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INPUTS_PER_PIECE = 512  # bounds the memory of unpacking; a multiple of what a word holds


class QuantizedWeights(Weights):
    """Weights of a quantized checkpoint. Tensors that are not quantized pass unchanged."""

    def __init__(self, weights: CheckpointWeights, config: QuantizationConfig) -> None:
        self._weights = weights
        self._config = config
        self._per_word = _WORD_BITS // config.bits

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; CheckpointError if it is missing or its parts do not fit together."""
        module = self._module(name)
        return self._weights.shape(name) if module is None else self._sizes(module)[:2]

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        module = self._module(name)
        if module is None:
            return self._weights.read(name, dtype)
        matrix = np.empty(self.shape(name), dtype)
        for inputs, values in self._pieces(module):
            matrix[:, inputs] = converted(values, dtype).T
        return matrix

    def check_biases(self, config: ModelConfig) -> None:
        """Raise CheckpointError for a bias that the model does not have, unless it is zero, as some tools write it."""
        expected = expected_shapes(config)
        for name in self._weights:
            is_extra = name.endswith(".bias") and name not in expected
            if is_extra and self._weights.read(name, np.float32).any():
                raise CheckpointError(
                    f"tensor {name} is not zero, but a {config.architecture} of this configuration has no such bias"
                )

    def _module(self, name: str) -> str | None:
        module = name.removesuffix(".weight")
        return module if module != name and f"{module}.qweight" in self._weights else None

    def _sizes(self, module: str) -> tuple[int, int, int]:
        """Check that the parts of a matrix fit together and return (outputs, inputs, groups)."""
        packed, scales = self._weights.shape(f"{module}.qweight"), self._weights.shape(f"{module}.scales")
        if len(packed) != 2 or len(scales) != 2:
            raise CheckpointError(f"tensors of {module} are no matrices: qweight {list(packed)}, scales {list(scales)}")
        num_groups, num_out = scales
        is_awq, group_size = self._config.method == "awq", self._config.group_size
        num_in = packed[0] if is_awq else packed[0] * self._per_word
        num_words = -(-num_out // self._per_word)
        fits = {
            "qweight": packed[1] == (num_words if is_awq else num_out),
            "scales": num_groups == (1 if group_size == -1 else -(-num_in // group_size)) and num_out > 0,
            "qzeros": self._weights.shape(f"{module}.qzeros") == (num_groups, num_words),
        }
        if self._has_g_idx(module):
            fits["g_idx"] = self._weights.shape(f"{module}.g_idx") == (num_in,)
        for part, is_right in fits.items():
            if not is_right:
                raise CheckpointError(
                    f"tensor {module}.{part} has shape {list(self._weights.shape(f'{module}.{part}'))}, which does not "
                    f"fit a matrix of {num_out} x {num_in} with group_size {group_size} and {self._config.bits} bits"
                )
        return num_out, num_in, num_groups

    def _has_g_idx(self, module: str) -> bool:
        return self._config.method == "gptq" and f"{module}.g_idx" in self._weights

    def _pieces(self, module: str) -> Iterator[tuple[slice, Float32Array]]:
        """Yield slices of inputs, each with its weights, fp32 [inputs, out]."""
        num_out, num_in, num_groups = self._sizes(module)
        packed = self._weights.int32(f"{module}.qweight").view(np.uint32)
        scales = self._weights.float32(f"{module}.scales", (num_groups, num_out))
        # GPTQ's first format subtracts the offset from whole words, so that a zero point of 0 borrows from the next.
        offsets = np.uint32(self._config.zero_offset * (0xFFFFFFFF // ((1 << self._config.bits) - 1)))
        stored = self._weights.int32(f"{module}.qzeros").view(np.uint32) + offsets
        zeros = self._unpack(stored)[:, :num_out].astype(np.float32)
        groups = self._groups(module, num_in, num_groups)
        for start in range(0, num_in, _INPUTS_PER_PIECE):
            inputs = slice(start, min(start + _INPUTS_PER_PIECE, num_in))
            if self._config.method == "awq":
                quants = self._unpack(packed[inputs])[:, :num_out]
            else:
                words = packed[start // self._per_word : inputs.stop // self._per_word]
                quants = self._unpack(np.ascontiguousarray(words.T)).T
            group = groups[inputs]
            yield inputs, (quants.astype(np.float32) - zeros[group]) * scales[group]

    def _groups(self, module: str, num_in: int, num_groups: int) -> npt.NDArray[Any]:
        if not self._has_g_idx(module):
            return np.arange(num_in) // (num_in if self._config.group_size == -1 else self._config.group_size)
        groups = self._weights.int32(f"{module}.g_idx")
        if groups.min() < 0 or groups.max() >= num_groups:
            raise CheckpointError(f"tensor {module}.g_idx names groups outside of 0 to {num_groups - 1}")
        return groups

    def _unpack(self, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """Unpack words [rows, n] to numbers [rows, n * per word], in the order of the outputs or inputs."""
        bits = self._config.bits
        shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
        if self._config.method == "awq":
            shifts = shifts[np.argsort(_AWQ_ORDER)]
        values = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
        found: npt.NDArray[np.uint8] = values.astype(np.uint8).reshape(len(words), -1)
        return found
