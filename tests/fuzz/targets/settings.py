"""Files that users give or `faser profile` writes: faser.yaml, cost tables, acceptance files, traces, datasets."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.serve.dataset import DATASETS, read_dataset
from faser_trtllm.acceptance_curves import by_place, parse_curves
from faser_trtllm.config import load_service_config, read_mapping
from faser_trtllm.core.cost_table import CostSample, CostTable, ExitModel, Fingerprint, Interference
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.profiling.report import error_lines, refit_errors
from lab.planner.load.acceptance import Acceptance
from lab.planner.load.trace import read_trace
from tests.fuzz.scratch import JSON, put, to_json
from tests.fuzz.target import Codec, Target

ROOT = Path(__file__).parents[3]
HERE = Fingerprint("Some CPU", "avx2", 2, "abc")


# faser.yaml


def run_yaml(data: bytes) -> None:
    config = load_service_config(put("yaml/faser.yaml", data), {"engine_dir": "E"})
    assert config.steps_per_response >= 1


def yaml_seeds() -> list[bytes]:
    small = b"max_batch_size: 8\nspeculation: fixed:4\ndrafters: [suffix, model]\nkv_cache_config:\n  dtype: fp8\n"
    more = b"base: &a {max_tokens: 64}\nkv_cache_config: *a\nstream_interval: 3\nsynthetic_acceptance: [0.5, .25]\n"
    merged = b"x: &x {a: 1}\nkv_cache_config:\n  <<: *x\n  enable_block_reuse: no\ncores: [0, 1]\n? [a]\n: b\n"
    others = b"drafters: suffix,model\nsynthetic_acceptance: eagle3\nscheduler_config: !!map {chunk_unit_size: 0x10}\n"
    return [(ROOT / "examples/faser.yaml").read_bytes(), small, more, merged, others, b'{"max_queue_size": 1e3}', b""]


# cost tables


def run_cost_table(data: bytes) -> None:
    path = put("cost/profile.json", data)
    table = CostTable.load(path, HERE)
    _ = table.warnings, table.doubtful_kinds, table.held_out_errors, table.num_segments
    for partition in table.partitions:
        table.verify_ms(17, 3, 100.0, partition)
        table.verify_ms_array(70, 3, 100.0, partition)
        if table.has("draft_step", partition):
            table.draft_step_ms_array(9, 100.0, partition)
            table.draft_first_ms_array(9, 1.5, 100.0, partition)
        table.interference_of("draft", partition)
    if table.has("verify"):
        table.decode_ms(4, 64.0)
    for model in table.exits:
        table.exit_ms(model.boundary, 8)
    CostTable.from_json(json.loads(json.dumps(table.to_json())))
    with contextlib.suppress(InvalidArgumentError):
        list(error_lines(refit_errors(path)))


def _samples() -> list[CostSample]:
    rows = [(n, b, c) for n in (1, 2, 4, 16, 17, 32) for b in {1, n} for c in (64, 512)]
    found = [CostSample("verify", n, b, c, 0.4 + 0.02 * n + 1e-5 * n * c) for n, b, c in rows]
    found += [CostSample("draft_step", n, n, 64, 0.05 + 0.01 * n) for n in (1, 2, 4)]
    return found + [CostSample("segment:0", n, 1, 64, 0.1 * n) for n in (1, 8)]


def cost_table_seeds() -> list[bytes]:
    samples = _samples()
    exits = [ExitModel(1, 0.1, 0.2, 0.3, -0.5, True)]
    table = CostTable.fit(
        samples, HERE, held_out=samples[:3], interference=[Interference("draft", "verify", 1.1, 1.2)], exits=exits
    )
    whole = table.to_json() | {"traffic": {"gb": {"target": 1.0}, "gb_per_token": {}, "gb_per_ms": {"all": 2.0}}}
    kept = {"samples": [vars(sample) for sample in samples], "held_out": [vars(samples[0])]}
    old = {key: value for key, value in whole.items() if key not in ("errors", "quick", "source")}
    return [json.dumps(entry).encode() for entry in (whole, whole | kept, old | kept, old)]


# load


def run_acceptance(data: bytes) -> None:
    found = Acceptance.load(put("load/acceptance.json", data))
    assert found.by_place


def run_trace(data: bytes) -> None:
    for row in read_trace(put("load/trace.csv", data)):
        assert row.at_s == row.at_s


TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.03,396,109\n"


# acceptance curves and datasets of benchmarks


def run_golden(data: bytes) -> None:
    path = put("golden/curves.yaml", data)
    for lengths in parse_curves(read_mapping(path), path.name).values():
        assert all(0.0 <= chance <= 1.0 for chance in by_place(lengths))


def run_dataset(data: bytes) -> None:
    """The same bytes as each dataset: what one reads, others may not."""
    for name in DATASETS:
        for suffix in ("jsonl", "jsonl.gz"):
            with contextlib.suppress(InvalidArgumentError):
                for conversation in read_dataset(name, put(f"dataset/rows.{suffix}", data)):
                    assert all(turn.encode() for turn in conversation.turns)


def dataset_seeds() -> list[bytes]:
    turns = {"question_id": 81, "category": "writing", "turns": ["a", "b"]}
    said = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    human_eval = {"task_id": "HumanEval/0", "prompt": "def one():\n", "test": "pass"}
    custom = {"prompt": "a", "output_tokens": 7, "category": "x"}
    exchange = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    lines = [to_json(row) for row in (turns, {"category": "math", "messages": said}, human_eval, custom)]
    share_gpt = to_json([{"id": "a", "conversations": exchange}, {"id": "b", "conversations": []}])
    return [*lines, b"\n".join(lines), gzip.compress(lines[0], mtime=0), share_gpt]


def _yaml(value: Any) -> bytes:
    return yaml.safe_dump(value).encode()


TARGETS = (
    Target(
        "yaml",
        run_yaml,
        yaml_seeds,
        ("config.py",),
        Codec(yaml.safe_load, _yaml),
        words=("auto", "fp8", "suffix", "kv_cache_config", "scheduler_config", "stream_interval", "*a", "<<", "&a"),
    ),
    Target(
        "cost_table",
        run_cost_table,
        cost_table_seeds,
        ("core/cost_table.py", "core/cost_curve.py", "core/curve_error.py"),
        JSON,
        words=(
            "verify@all",
            "draft_step@all",
            "verify@verify",
            "segment:0@all",
            "sizes",
            "samples",
            "held_out",
            "errors",
        ),
    ),
    Target(
        "acceptance",
        run_acceptance,
        lambda: [to_json({"by_place": [0.7, 0.5]}), to_json({"by_place": [0.9], "concentration": 5.0, "sharpness": 2})],
        (),  # a few lines of a module that is no parser
        JSON,
    ),
    Target("trace", run_trace, lambda: [TRACE, b"at_s,input\n0.5,3\n"], ("planner/load/trace.py",)),
    Target(
        "golden",
        run_golden,
        lambda: [b"a: {t: {1: 1.5, 2: 1.75}}", b"a:\n  off:\n    1: 2\n    2: 2.5\nb: {x: {1: 1}}\n"],
        ("acceptance_curves.py",),
        Codec(yaml.safe_load, _yaml),
    ),
    Target(
        "dataset",
        run_dataset,
        dataset_seeds,
        ("bench/serve/dataset.py",),
        JSON,
        words=("turns", "messages", "category", "prompt", "output_tokens", "conversations", "assistant", "PAR1"),
    ),
)
