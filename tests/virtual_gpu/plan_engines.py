"""TensorRT engine directories of tiny models, built and run in a process with the virtual GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import DrafterName, ExecutorConfig
from faser_trtllm.core.cost_table import ExitModel
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.fingerprint import PROFILE, fingerprint_of
from faser_trtllm.serving.text.offline import generate_all
from tests.engine.cuda.host_executor import make
from tests.support.checkpoints import make_pair
from tests.support.executor_harness import Collector, toy_costs
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.generation import Generated

# Drafts are dropped that the first segment's scores do not clearly bear out.
_EXIT = ExitModel(1, rank=-1.5, gap=-0.5, survival=1.0, intercept=-1.0, pays=True)


def build_plans(directory: Path, backend: str = "tensorrt", dtype: str = "float32", **options: Any) -> Path:
    """A target of three layers with an exit behind the first, which is its own draft, or unless it drafts_itself that
    of one layer; with a cost table that says that drafts cost little, that lanes overlap freely and that dropping rows
    pays."""
    sizes = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16 if dtype == "float32" else 64}
    if longest := options.pop("max_position_embeddings", None):
        sizes["max_position_embeddings"] = longest
    target, draft = make_pair(directory / "checkpoints", **sizes)
    draft = target if options.pop("drafts_itself", True) else draft
    path = build_engine_dir(target, draft, directory / "engines", backend, dtype, **options)
    table = replace(toy_costs(), fingerprint=fingerprint_of(path, 1), exits=(_EXIT,))
    table.save(path / PROFILE)
    return path


def build_engine_dir(
    target: Path, draft: Path | None, directory: Path, backend: str, dtype: str, **options: Any
) -> Path:
    """With an exit behind the target's first layer."""
    sizes = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 96, "max_draft_len": 4} | options
    engines = build_engines(
        BuildOptions(target, draft, directory, backend=backend, dtype=dtype, exit_layers=(1,), **sizes)
    )
    assert engines is not None
    return engines.path


def generate_texts(
    path: Path, speculation: str, prompts: Sequence[str], drafters: tuple[str, ...] | None = None, **fields: Any
) -> Generated:
    """Each prompt's tokens, greedy."""
    fields = {"max_tokens": 32, "temperature": 0.0, "end_ids": ()} | fields
    before = Counters.now()
    names = None if drafters is None else tuple(map(DrafterName, drafters))
    with open_executor(path, ExecutorConfig(speculation=speculation, drafters=names)) as executor:
        found = [answer.token_ids for answer in generate_all(executor, path, prompts, fields)]
        stats = executor.stats()
    return Generated([list(tokens) for tokens in found], stats, Counters.now().since(before))


def generate_requests(path: Path, policy: str, requests: Any, seed: int = 0, **config: Any) -> Generated:
    """Generate with a policy of the tests (tests/engine/cuda/host_executor.py). seed: the seed of the order of work.
    config: keys of ExecutorConfig. Counting starts at the first request."""
    driver().seed(seed)
    collector = Collector()
    config = ExecutorConfig(speculation="off" if policy == "off" else "fixed:1", **config)  # opens the draft or not
    with open_executor(path, config, wrap_policy=lambda _: make(policy)) as executor:
        before = Counters.now()
        for index, (prompt, params) in enumerate(requests):
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            pass
        executor.check_integrity()
        stats, counted = executor.stats(), Counters.now().since(before)
    return Generated([collector.tokens[str(index)] for index in range(len(requests))], stats, counted)


def prompt_log_probs(
    path: Path, speculation: str, prompts: Sequence[Sequence[int]], **fields: Any
) -> list[list[float]]:
    """Return the log probabilities of each prompt's tokens but the first."""
    collector = Collector()
    params = SamplingParams(max_tokens=2, return_context_log_probs=True, **fields)
    with open_executor(path, ExecutorConfig(speculation=speculation)) as executor:
        for index, prompt in enumerate(prompts):
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            pass
    return [collector.requests[str(index)].context_log_probs for index in range(len(prompts))]
