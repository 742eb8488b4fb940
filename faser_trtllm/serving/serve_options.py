"""What `faser serve` is told, and what becomes of it: the effective configuration, the models, engines that fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir, hash_mismatches
from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import EngineFileError, InvalidArgumentError, reason_of
from faser_trtllm.executor.factory import choose_policy
from faser_trtllm.trtllm.convert import Conversion, read_config
from faser_trtllm.trtllm.synthetic import with_forced_acceptance

MODEL_NAME = "faser"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `faser serve` is told.

    engine_dir: None takes it from config or FASER_ENGINE_DIR. config: a faser.yaml, or a configuration of
    TensorRT-LLM; None: the repository's.
    model_repo, tritonserver: None finds them. speculation: None leaves it to config.
    models: to load, folders of the repository; None: all of them. One engine serves them all.
    allow_hash_mismatch: serve engines whose files are not those of their manifest, with a warning for each.
    settings: keys of faser.yaml that go before those of config.
    allow_control: leave Triton's control APIs open to whoever reaches its ports; else they want the key of control.py.
    log_file: where messages go; None is this process's stderr. verbose: Triton's information too.
    """

    engine_dir: Path | None = None
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str = "127.0.0.1"
    config: Path | None = None
    model_repo: Path | None = None
    speculation: str | None = None
    tritonserver: Path | None = None
    models: tuple[str, ...] | None = (MODEL_NAME,)
    settings: Mapping[str, Any] = field(default_factory=dict)
    allow_hash_mismatch: bool = False
    allow_control: bool = False
    log_file: Path | None = None
    verbose: bool = False

    @property
    def ports(self) -> dict[str, int]:
        return {"http_port": self.http_port, "grpc_port": self.grpc_port, "metrics_port": self.metrics_port}


def effective_config(options: ServeOptions, repository: Path) -> tuple[ServiceConfig, Conversion | None]:
    """The file's settings under those of the options, with an absolute engine_dir; how the file was converted."""
    own_file = repository / MODEL_NAME / "1" / "faser.yaml"
    path = options.config or (own_file if own_file.exists() else None)
    speculation = {} if options.speculation is None else {"speculation": options.speculation}
    file_config, conversion = read_config(path, {**options.settings, **speculation})
    file_config = with_forced_acceptance(file_config, os.environ)
    engine_dir = options.engine_dir or file_config.engine_dir or os.environ.get("FASER_ENGINE_DIR")
    if not engine_dir:
        raise InvalidArgumentError("engine_dir is not set; name it with --engine_dir or in the configuration file")
    return file_config.model_copy(update={"engine_dir": str(Path(engine_dir).absolute())}), conversion


def check_engines(config: ServiceConfig, allow_hash_mismatch: bool) -> tuple[str, ...]:
    """Raise what the engine process would, before a server is started for nothing; hashes are compared too.

    The result: what is wrong with the hashes, a clause per file; only allow_hash_mismatch lets them pass.
    """
    path = Path(config.engine_dir or "")
    engines = EngineDir.load(path)
    if engines.has_draft:
        built = engines.build_config
        num_threads = config.num_threads or len(config.cores or os.sched_getaffinity(0))
        max_draft_len, max_batch_size = config.max_draft_len or built.max_draft_len, built.max_batch_size
        choose_policy(path, config.speculation, num_threads, max_draft_len, max_batch_size)
    mismatches = tuple(hash_mismatches(path, engines.manifest["files"]))
    if mismatches and not allow_hash_mismatch:
        more = f" ({len(mismatches) - 1} more files differ)" if len(mismatches) > 1 else ""
        raise EngineFileError(
            f"{mismatches[0]}{more}; rebuild it with faser build, or serve it all the same with --allow_hash_mismatch"
        )
    return mismatches


def choose_models(repository: Path, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """Folders of the repository to load; InvalidArgumentError names what is not there."""
    try:
        os.listdir(repository)
    except OSError as error:
        raise InvalidArgumentError(
            f"model_repo {repository} cannot be read: {reason_of(error)}; name another with --model_repo"
        ) from error
    there = tuple(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))
    for name in wanted or ():
        if name not in there:
            raise InvalidArgumentError(
                f"models has {name!r}, the model repository has {', '.join(there) or 'none'}; name one of these"
            )
    return wanted or there


def default_repository() -> Path:
    """The repository of the checkout, or the one installed with the package."""
    package = Path(__file__).resolve().parents[1]
    for path in (package.parent / "triton_model_repo", package / "triton_model_repo"):
        if (path / MODEL_NAME / "config.pbtxt").exists():
            return path
    raise InvalidArgumentError("the Triton model repository was not found; name it with --model_repo")
