"""Settings of fp8 in TensorRT engines: the roles that are quantized, and where activation scales come from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.builder.network.fp8 import is_layers
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.calibration import calibrate_input_scales
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.quantized_weight import FP8
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import Weights, expected_shapes

MIN_CAPABILITY = (8, 9)
"""The first compute capability whose tensor cores multiply e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """roles: the models in fp8. text: calibrates activations if a checkpoint has no scales."""

    roles: frozenset[str] = frozenset()
    text: str = ""

    def check_capability(self, capability: str) -> None:
        """Raise InvalidArgumentError if GPUs of this compute capability, such as "8.6", cannot multiply fp8."""
        major, minor = (int(part) for part in capability.split("."))
        if self.roles and (major, minor) < MIN_CAPABILITY:
            least = ".".join(map(str, MIN_CAPABILITY))
            raise InvalidArgumentError(
                f"quantization is {FP8} and compute_capability {capability}, fp8 products begin at {least}; build "
                "for newer GPUs or leave quantization out"
            )

    def identity(self, config: ModelConfig, weights: Weights) -> dict[str, Any]:
        """Return entries of TensorRT-LLM's QuantConfig, and the calibration text's sha256, None if it is not used."""
        is_calibrated = None in _stored_scales(config, weights).values()
        return {
            "quant_algo": FP8,
            "exclude_modules": ["lm_head"],
            "calibration_sha256": hashlib.sha256(self.text.encode()).hexdigest() if is_calibrated else None,
        }

    def input_scales(self, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> dict[str, float]:
        """Return {matrix: scale of its inputs}, from the checkpoint or from calibration, which takes a while."""
        stored = _stored_scales(config, weights)
        missing = [name for name, scale in stored.items() if scale is None]
        found = {name: scale for name, scale in stored.items() if scale is not None}
        if missing:
            calibrated = calibrate_input_scales(config, weights, tokenizer.encode(self.text))
            found |= {name: calibrated[name] for name in missing}
        return found


def recorded_scales(engine_config: Mapping[str, Any]) -> dict[str, float] | None:
    """Return {matrix: scale of its inputs} from an engine's parsed config.json; None if it is not in fp8."""
    quantization = engine_config["faser"].get("quantization")
    return None if quantization is None else dict(quantization["input_scales"])


def describe_fp8(role: str, stored_types: tuple[str, ...], config: ModelConfig, weights: Weights) -> str:
    """Return a sentence for the user: how matrices are converted and where activation scales come from."""
    matrices = [weights.fp8_matrix(f"{name}.weight") for name in _matrices(config)]
    fate = f"{', '.join(stored_types)} matrices of the layers become e4m3, which keeps 4 significant bits"
    if None not in matrices:
        fate = "e4m3 matrices are kept, except those with different scales that are multiplied as one"
    scales = "calibrated" if None in _stored_scales(config, weights).values() else "the checkpoint's"
    return f"{role}: {fate}; scales of activations are {scales}"


def _matrices(config: ModelConfig) -> list[str]:
    """Return names of the layers' matrices, without .weight."""
    return [name.removesuffix(".weight") for name, shape in expected_shapes(config).items() if is_layers(name, shape)]


def _stored_scales(config: ModelConfig, weights: Weights) -> dict[str, float | None]:
    return {name: weights.input_scale(name) for name in _matrices(config)}
