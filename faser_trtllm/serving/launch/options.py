"""The options of `faser serve`, the configuration that results from them, and checks of the engines."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir, hash_mismatches
from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import EngineFileError, InvalidArgumentError
from faser_trtllm.executor.settings import check_settings, choose_costs, choose_drafters, policy_of
from faser_trtllm.profiling.ensure import ensure_profile
from faser_trtllm.serving.launch.hashes import FileHashes
from faser_trtllm.serving.observe.spans import check_endpoint
from faser_trtllm.trtllm.convert.convert import Conversion, read_config
from faser_trtllm.trtllm.convert.synthetic import with_forced_acceptance

log = logging.getLogger(__name__)

MODEL_NAME = "faser"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `faser serve`.

    engine_dir: None uses config or FASER_ENGINE_DIR.
    config: a faser.yaml or a TensorRT-LLM configuration; None uses the repository's faser.yaml.
    model_repo, tritonserver: None searches for them.
    speculation, drafters, num_branches, deterministic: None uses config.
    models: folders of the repository to load; None loads all. One engine serves them all.
    decoupled: False serves requests with one response each, also over HTTP's and gRPC's infer, and refuses streaming.
    settings: keys of faser.yaml that override config.
    allow_hash_mismatch: serve engines whose files differ from their manifest, with a warning for each file.
    allow_control: leave Triton's control APIs open to all clients; otherwise they require the key of control.py.
    allow_vulnerable_triton: listen on any host, whatever version the server has; otherwise check_exposure() decides.
    log_file: None writes messages to this process's stderr.
    verbose: include Triton's info messages.
    """

    engine_dir: Path | None = None
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str = "127.0.0.1"
    config: Path | None = None
    model_repo: Path | None = None
    speculation: str | None = None
    drafters: str | None = None
    num_branches: int | None = None
    deterministic: bool | None = None
    tritonserver: Path | None = None
    models: tuple[str, ...] | None = (MODEL_NAME,)
    decoupled: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    allow_hash_mismatch: bool = False
    allow_control: bool = False
    allow_vulnerable_triton: bool = False
    log_file: Path | None = None
    verbose: bool = False

    @property
    def ports(self) -> dict[str, int]:
        return {"http_port": self.http_port, "grpc_port": self.grpc_port, "metrics_port": self.metrics_port}


def effective_config(options: ServeOptions, repository: Path) -> tuple[ServiceConfig, Conversion | None]:
    """Return the file's settings overridden by the options, and the report on a converted TensorRT-LLM file or None."""
    own_file = repository / MODEL_NAME / "1" / "faser.yaml"
    path = options.config or (own_file if own_file.exists() else None)
    flags = {key: getattr(options, key) for key in ("speculation", "drafters", "num_branches", "deterministic")}
    given = {key: value for key, value in flags.items() if value is not None}
    file_config, conversion = read_config(path, {**options.settings, **given})
    file_config = with_forced_acceptance(file_config, os.environ)
    engine_dir = options.engine_dir or file_config.engine_dir or os.environ.get("FASER_ENGINE_DIR")
    if not engine_dir:
        raise InvalidArgumentError("engine_dir is not set; set it with --engine_dir or in the configuration file")
    return file_config.model_copy(update={"engine_dir": str(Path(engine_dir).absolute())}), conversion


def check_engines(
    config: ServiceConfig, allow_hash_mismatch: bool, hashes: FileHashes, is_restart: bool = False
) -> tuple[str, ...]:
    """Raise the errors that the engine process would raise, before a server is started, and compare hashes.

    Returns one clause per file whose hash differs, or raises EngineFileError without allow_hash_mismatch. With
    is_restart, a cost table is used even if its measurement was disturbed. Raises StoppedError like hashes.of().
    """
    path = Path(config.engine_dir or "")
    engines = EngineDir.load(path)
    check_settings(engines, config)
    if config.otlp_traces_endpoint:
        check_endpoint(config.otlp_traces_endpoint)
    drafters = choose_drafters(engines, config)
    if drafters and engines.build_config.max_draft_len:
        built = engines.build_config
        num_threads = config.num_threads or len(config.cores or os.sched_getaffinity(0))
        max_draft_len, max_batch_size = config.max_draft_len or built.max_draft_len, built.max_batch_size
        ensure_profile(path, config, replace_disturbed=not is_restart)
        costs = choose_costs(path, config.speculation, num_threads)
        for warning in costs.warnings if costs is not None and not is_restart else ():
            log.warning("%s", warning)
        policy_of(config.speculation, max_draft_len, max_batch_size, costs, drafters)
    mismatches = tuple(hash_mismatches(path, engines.manifest["files"], hashes.of))
    if mismatches and not allow_hash_mismatch:
        more = f" ({len(mismatches) - 1} more files differ)" if len(mismatches) > 1 else ""
        raise EngineFileError(
            f"{mismatches[0]}{more}; rebuild it with faser build, or serve it anyway with --allow_hash_mismatch"
        )
    return mismatches


def default_repository() -> Path:
    """Return the model repository of the checkout or of the installed package; raise InvalidArgumentError."""
    package = Path(__file__).resolve().parents[2]
    for path in (package.parent / "triton_model_repo", package / "triton_model_repo"):
        if (path / MODEL_NAME / "config.pbtxt").exists():
            return path
    raise InvalidArgumentError("the Triton model repository was not found; name it with --model_repo")
