"""An engine for NVIDIA Dynamo: `python -m faser_trtllm.serving.dynamo.worker --engine_dir E --model_path CHECKPOINT`.

Dynamo's worker process registers the model; Dynamo's frontend tokenizes, routes and detokenizes. The executor runs in
the worker process, without Triton. Requires the packages ai-dynamo and ai-dynamo-runtime; see docs/integrations.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.llm.exceptions import InvalidArgument, Unknown, WorkerUnavailable

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import SPELLINGS, ExecutorConfig, parse
from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import FinishReason
from faser_trtllm.errors import FaserError, InvalidArgumentError, UnavailableError
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.ensure import ensure_profile
from faser_trtllm.serving.dynamo.events import CacheEvents
from faser_trtllm.serving.dynamo.request import make_chunk, read_params, read_token_ids

RANK = 0  # one engine per worker


@dataclass(frozen=True)
class DynamoOptions:
    """The worker's options; speculation None is the default of ExecutorConfig."""

    engine_dir: Path
    model_path: Path  # checkpoint whose tokenizer, chat template and config.json the frontend reads
    served_model_name: str | None = None
    speculation: str | None = None
    drain_timeout_s: float = 10.0  # time for running requests to finish when the worker stops


class FaserEngine(LLMEngine):  # type: ignore[misc]
    """An engine that opens the executor in start(). All methods run on Dynamo's event loop."""

    def __init__(self, options: DynamoOptions) -> None:
        self._options = options
        self._executor: Executor | None = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._events = CacheEvents(self._publish_load)
        self._load_publisher: Any = None
        self._open: dict[str, set[str]] = {}  # Dynamo's request id -> our request ids
        self._numbers = itertools.count()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[FaserEngine, WorkerConfig]:
        """Return the engine, not yet started, and the configuration of its worker."""
        arguments = _parser().parse_args(argv)
        options = DynamoOptions(**{one.name: getattr(arguments, one.name) for one in fields(DynamoOptions)})
        worker_config = WorkerConfig(
            namespace=arguments.namespace,
            component=arguments.component,
            endpoint=arguments.endpoint,
            model_name=str(arguments.model_path),
            served_model_name=arguments.served_model_name,
            endpoint_types=arguments.endpoint_types,
            discovery_backend=arguments.discovery_backend,
            request_plane=arguments.request_plane,
            event_plane=arguments.event_plane,
            enable_kv_routing=not arguments.disable_kv_routing,
        )
        return cls(options), worker_config

    async def start(self, worker_id: int) -> EngineConfig:
        """Open the engines; raise FaserError if that fails."""
        options = self._options
        config = parse(ExecutorConfig, {"speculation": options.speculation} if options.speculation else {})
        await asyncio.to_thread(ensure_profile, options.engine_dir, config)
        self._executor = executor = await asyncio.to_thread(open_executor, options.engine_dir, config)
        engines = EngineDir.load(options.engine_dir)
        self._eos_token_ids = tuple(Tokenizer.load(engines.tokenizer_dir, engines.vocab_size).eos_token_ids)
        executor.watch_cache(self._events)
        executor.start()
        gauges, built = executor.stats(), engines.build_config
        return EngineConfig(
            model=str(options.model_path),
            served_model_name=options.served_model_name,
            llm=LlmRegistration(
                context_length=executor.max_seq_len,
                kv_cache_block_size=executor.tokens_per_block,
                total_kv_blocks=int(gauges["kv_num_blocks"]),
                max_num_seqs=built.max_batch_size,
                max_num_batched_tokens=built.max_num_tokens,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a chunk of new tokens per step; raise Dynamo's exceptions. Closing the iterator cancels the request."""
        executor = self._started()
        outputs: asyncio.Queue[tuple[dict[str, Any], str | None]] = asyncio.Queue()
        request_id = f"{context.id()}-{next(self._numbers)}"
        sink = _Sink(asyncio.get_running_loop(), outputs)
        try:
            params = read_params(request, executor.max_seq_len, self._eos_token_ids)
            executor.submit(request_id, read_token_ids(request), params, sink)
        except FaserError as error:
            raise _as_dynamo_s(error) from error
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the request cannot be read: {error}") from error
        self._open.setdefault(context.id(), set()).add(request_id)
        if context.is_stopped():
            executor.cancel(request_id)
        try:
            while True:
                chunk, failure = await outputs.get()
                if failure is not None:
                    raise Unknown(failure)
                yield chunk
                if "finish_reason" in chunk:
                    return
        finally:
            executor.cancel(request_id)
            left = self._open[context.id()]
            left.discard(request_id)
            if not left:
                del self._open[context.id()]

    async def abort(self, context: Any) -> None:
        """Cancel the requests of a context; generate() still yields their last chunks, with reason "cancelled"."""
        if self._executor is not None:
            for request_id in self._open.get(context.id(), ()):
                self._executor.cancel(request_id)

    async def cleanup(self) -> None:
        """Give requests drain_timeout_s to finish, cancel the rest and free the engines. May be called again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.drain, self._options.drain_timeout_s)
            await asyncio.to_thread(executor.close)
        await asyncio.to_thread(self._events.close)

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [PushSource(on_ready=self._events.start, dp_rank=RANK)]

    async def health_check_payload(self) -> dict[str, Any] | None:
        payload: dict[str, Any] = build_health_check_payload(next(iter(self._eos_token_ids), 0))
        return payload

    def component_metrics_dp_ranks(self) -> list[int]:
        return [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._load_publisher = publisher

    def _started(self) -> Executor:
        if self._executor is None:
            raise WorkerUnavailable("the engine is not running; send the request to another worker")
        return self._executor

    def _publish_load(self) -> None:
        executor, publisher = self._executor, self._load_publisher
        if executor is None or publisher is None:
            return
        stats = executor.stats()
        total = int(stats["kv_num_blocks"])
        used = total - int(stats["kv_num_free_blocks"])
        publisher.publish(RANK, ComponentSnapshot(used, total, used / max(1, total), RANK))


class _Sink:
    """The executor's sink of one request; passes its outputs from the executor's thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outputs: asyncio.Queue[Any]) -> None:
        self._loop = loop
        self._outputs = outputs
        self._num_tokens = 0

    def __call__(self, output: RequestOutput) -> bool:
        failure = None
        if output.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT):
            failure = output.request.error or f"the request ended with {output.finish_reason.value}"
        chunk = make_chunk(output, self._num_tokens)
        self._num_tokens += len(output.new_token_ids)
        if chunk["token_ids"] or output.finish_reason is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(partial(self._outputs.put_nowait, (chunk, failure)))
        return False


def _as_dynamo_s(error: FaserError) -> Exception:
    if isinstance(error, InvalidArgumentError):
        return InvalidArgument(str(error))  # type: ignore[no-any-return]
    if isinstance(error, UnavailableError):
        return WorkerUnavailable(str(error))  # type: ignore[no-any-return]
    return Unknown(str(error))  # type: ignore[no-any-return]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Serve faser_trtllm engines as a worker of NVIDIA Dynamo.")
    parser.add_argument("--engine_dir", type=Path, required=True, help="a directory that `faser build` wrote")
    parser.add_argument(
        "--model_path", type=Path, required=True, help="the target's checkpoint (tokenizer, chat template, config.json)"
    )
    parser.add_argument("--served_model_name")
    parser.add_argument("--speculation", help=SPELLINGS)
    parser.add_argument("--drain_timeout_s", type=float, default=10.0)
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--component", default="backend")
    parser.add_argument("--endpoint", default="generate")
    parser.add_argument("--endpoint_types", default="chat,completions")
    parser.add_argument("--discovery_backend", default="etcd", help="Dynamo's discovery: etcd, kubernetes, file or mem")
    parser.add_argument("--request_plane", default="tcp")
    parser.add_argument("--event_plane")
    parser.add_argument("--disable_kv_routing", action="store_true", help="do not report cached prefixes and load")
    return parser


def main() -> None:
    from dynamo.common.backend.run import run

    run(FaserEngine)


if __name__ == "__main__":
    main()
