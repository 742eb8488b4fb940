"""Our own system, with one executor per speculation setting, stepped in the calling thread."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.workers.protocol import CONTEXT_LEN, Counts, Laps, TokenIds, serve, step_mix, time_steps

TIMES = ("schedule_ms", "draft_ms", "verify_ms", "update_ms")


class Faser:
    """Our system. Settings: "off" and "fixed:K", as in ExecutorConfig.speculation."""

    def load(self, request: dict[str, Any]) -> dict[str, str]:
        import faser_trtllm
        from faser_trtllm.executor.factory import open_executor

        self._request = request
        self._open_executor = open_executor
        self._executors: dict[str, Any] = {}
        self._request_ids = itertools.count()
        self._executor("off")
        return {"faser_trtllm": faser_trtllm.__version__, "numpy": np.__version__}

    def generate(self, setting: str, prompts: Sequence[list[int]], max_tokens: int, counts: Counts) -> TokenIds:
        from faser_trtllm.core.sampling_params import SamplingParams

        executor = self._executor(setting)
        before = executor.stats()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        sinks = [_Sink() for _ in prompts]
        for prompt, sink in zip(prompts, sinks, strict=True):
            executor.submit(f"bench-{next(self._request_ids)}", prompt, params, sink)
        laps, waiting = Laps(counts), True
        while not all(sink.finished for sink in sinks):
            if not executor.step():
                raise RuntimeError("the executor is idle, but a request has not ended")
            if not waiting:
                laps.end_step()
            elif all(sink.token_ids for sink in sinks):
                laps.end_prefill()
                waiting = False
        after = executor.stats()
        for sink in sinks:
            counts.num_target_passes += sink.stats.num_steps
            counts.num_draft_tokens += sink.stats.num_draft_tokens
            counts.num_accepted_tokens += sink.stats.num_accepted_tokens
        for key in TIMES:
            counts.times_ms[key] = counts.times_ms.get(key, 0.0) + after[key] - before[key]
        return [sink.token_ids for sink in sinks]

    def steps(self, num_rows: Sequence[int], num_repeats: int) -> dict[int, float]:
        from faser_trtllm.engine.cpu.engine import CpuEngine
        from faser_trtllm.partition.core_set import CoreSet

        max_requests = max(len(step_mix(rows)) for rows in num_rows)
        blocks_per_seq = -(-(CONTEXT_LEN + 4) // 32)
        with (
            CoreSet(self._request["cores"], self._request["num_threads"]) as core_set,
            CpuEngine.open(
                Path(self._request["engine_dir"]) / "target" / "rank0.engine",
                core_set,
                num_blocks=max_requests * blocks_per_seq,
                tokens_per_block=32,
                max_batch_size=max_requests,
                max_num_tokens=max(CONTEXT_LEN, *num_rows),
            ) as engine,
        ):
            blocks = np.arange(max_requests * blocks_per_seq, dtype=np.int32)
            block_table = blocks.reshape(max_requests, blocks_per_seq)
            return {rows: _time_step(engine, step_mix(rows), block_table, num_repeats) for rows in num_rows}

    def _executor(self, setting: str) -> Any:
        if setting not in self._executors:
            from faser_trtllm.config import ExecutorConfig, parse

            config = {
                "speculation": setting,
                # Prompts repeat every round, and reuse would skip their prefill, which peers have to run.
                "kv_cache_config": {"enable_block_reuse": False},
                "num_threads": self._request["num_threads"],
                "cores": self._request["cores"],
            }
            self._executors[setting] = self._open_executor(
                Path(self._request["engine_dir"]), parse(ExecutorConfig, config)
            )
        return self._executors[setting]


class _Sink:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finished = False
        self.stats: Any = None

    def __call__(self, output: Any) -> bool:
        self.token_ids += output.new_token_ids
        self.finished = output.finish_reason is not None
        self.stats = output.request.stats
        return False


def _time_step(engine: Any, mix: list[int], block_table: Any, num_repeats: int) -> float:
    from faser_trtllm.core.batch import BatchBuilder

    builder = BatchBuilder(block_table)
    tokens = (1 + np.arange(CONTEXT_LEN + 8) % 500).astype(np.int32)
    for slot in range(len(mix)):
        builder.clear()
        builder.add(slot, tokens, 0, CONTEXT_LEN, 0)
        engine.forward(builder.build())

    def step() -> None:
        builder.clear()
        for slot, rows in enumerate(mix):
            builder.add(slot, tokens, CONTEXT_LEN, CONTEXT_LEN + rows, rows)
        engine.forward(builder.build())

    return time_steps(step, num_repeats)


if __name__ == "__main__":
    try:
        serve(Faser())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
