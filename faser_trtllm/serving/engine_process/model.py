"""A Triton model that the engine process serves: its configuration, contract and metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faser_trtllm.config import ServiceConfig, load_service_config
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.engine_process.client_rules import ClientRules
from faser_trtllm.serving.engine_process.metrics import ModelMetrics
from faser_trtllm.serving.engine_process.wire import OpenFrame
from faser_trtllm.serving.launch.run_dir import RUN_DIR_VARIABLE, STARTUP_ERROR_FILE
from faser_trtllm.serving.triton.contract import ModelContract
from faser_trtllm.serving.triton.request import Part, parse_request


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An open Triton model, with the rules of triton/contract.py for its name."""

    number: int
    contract: ModelContract
    is_decoupled: bool
    normalize_log_probs: bool
    metrics: ModelMetrics
    cancel: Callable[[str], None]  # ends the executor's request with this id
    rules: ClientRules = field(default_factory=ClientRules)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # request fields that its configuration sets

    def check_input(self, name: str, shape: Sequence[int], num_bytes: int, is_text: bool) -> None:
        """Raise InvalidArgumentError for an input that is too large to be read."""
        self.contract.check_input(name, shape, num_bytes, is_text)

    def parse(self, tensors: Mapping[str, Any], client_key: str = "") -> list[Part]:
        """Return the sequences that a client's request asks for; raise InvalidArgumentError."""
        canonical = self.contract.canonical(tensors)
        parts = parse_request(
            canonical,
            self.contract,
            normalize_log_probs=self.normalize_log_probs,
            defaults=self.defaults,
            admit=lambda request: self.rules.applied(request, client_key),
        )
        if not self.is_decoupled:  # the model must send exactly one response
            if any(part.request.stream for part in parts):
                what = "is true: Streaming is only supported in decoupled mode."
                raise InvalidArgumentError(what, field="stream", value=True, limit=False)
            if len(parts) > 1:
                raise InvalidArgumentError(
                    f"the request asks for {len(parts)} sequences, allowed is 1 because the model is not decoupled; "
                    "send one request for each"
                )
        return parts


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Settings of a model's config.pbtxt."""

    is_decoupled: bool
    parameters: Mapping[str, str]

    @staticmethod
    def of(frame: OpenFrame) -> ModelConfig:
        config = json.loads(frame.config_json)
        parameters = config.get("parameters", {})
        return ModelConfig(
            is_decoupled=config.get("model_transaction_policy", {}).get("decoupled", True),
            parameters={name: parameter.get("string_value", "") for name, parameter in parameters.items()},
        )

    def flag(self, name: str, default: bool) -> bool:
        return self.parameters.get(name, str(default)).lower() == "true"

    def request_defaults(self) -> dict[str, bool]:
        """Return the request fields that parameters set, named like those of TensorRT-LLM's pre- and postprocessing."""
        names = ("add_special_tokens", "skip_special_tokens")
        return {name: self.flag(name, True) for name in names if self.parameters.get(name)}


def load_model_config(frame: OpenFrame) -> ServiceConfig:
    """Load the first file of FASER_CONFIG, the model parameter `config`, and faser.yaml in the version's folder.

    A model without its own faser.yaml uses that of the model `faser` next to it, so that both share one engine process.
    FASER_ENGINE_DIR, or else the parameter engine_dir, overrides the file's engine_dir. Raises InvalidArgumentError.
    """
    values = ModelConfig.of(frame).parameters
    model_dir = Path(frame.repository)
    files = (path / frame.version / "faser.yaml" for path in (model_dir, model_dir.parent / "faser"))
    own_file = next((path for path in files if path.exists()), None)
    path = os.environ.get("FASER_CONFIG") or values.get("config") or own_file
    engine_dir = os.environ.get("FASER_ENGINE_DIR") or values.get("engine_dir") or None
    config = load_service_config(Path(path) if path else None, {"engine_dir": engine_dir})
    if not config.engine_dir:
        raise InvalidArgumentError(
            "engine_dir is not set; set it in faser.yaml, as a model parameter or in FASER_ENGINE_DIR"
        )
    return config


def note_start_error(message: str) -> None:
    """Write why a model could not be opened to a file that `faser serve` reads, if that started the server."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir:
        Path(run_dir, STARTUP_ERROR_FILE).write_text(message)
