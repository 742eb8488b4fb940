"""The section "claims" finds what earlier sections of its folder measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import RESULT_FILE
from benchmarks.gpu.kernels.passes import CLAIMS, measured
from benchmarks.gpu.options import GpuBenchOptions
from tests.benchmarks.gpu.harness import walk

# Modeled us of a layer's launches and of acceptance; measured ms.
MODELED_US, ACCEPT_MS, DRAFT_MS, PASS_MS = 10.0, 0.15, 0.9, 7.25


def results() -> dict[str, Any]:
    kernels: dict[str, list[dict[str, Any]]] = {}
    for op, shape in {case for claim in CLAIMS for case in claim.cases}:
        kernels.setdefault(op, []).append({"shape": shape, "ms": ACCEPT_MS, "modeled_us": MODELED_US})
    passes = [claim for claim in CLAIMS if claim.model == "target"]
    steps = [
        {"form": form, "batch_size": c.num_requests, "rows_each": c.num_rows, "context": context, "ms": ms}
        for c in passes
        for form, context, ms in (("8B-128k", 512, 9.5), ("8B", 448, 5.5), ("8B", 512, PASS_MS))
    ]
    return {
        "environment": {"device": "NVIDIA H100 80GB HBM3"},
        "steps": {"steps": steps},
        "breakdown": {"wall ms, draft_step 1 1": {"448": 0.7, "512": DRAFT_MS}},
        "kernels": kernels,
    }


def rows_of(options: GpuBenchOptions, folder: Path, found: dict[str, Any]) -> list[list[str]]:
    sections = {name: {"values": values} for name, values in found.items()}
    (folder / RESULT_FILE).write_text(json.dumps({"sections": sections}))
    (table,) = walk("claims", dataclasses.replace(options, output_dir=folder))["tables"]
    rows: list[list[str]] = table["rows"]
    return rows


def test_each_claim_has_its_goal_and_what_was_measured_and_modeled(options: GpuBenchOptions, tmp_path: Path) -> None:
    rows = rows_of(options, tmp_path, results())
    assert [row[1] for row in rows] == [str(claim.goal_ms) for claim in CLAIMS]
    assert [row[2] for row in rows] == [*[f"{PASS_MS:.2f}"] * 4, f"{DRAFT_MS:.2f}", f"{ACCEPT_MS:.2f}"]
    of_one_row = measured()["passes"]["target"]["1 x 1"]["h100"]
    whole_us = of_one_row["products_us"] + of_one_row["rest_us"] + 32 * 3 * MODELED_US
    assert rows[0][3:] == [f"{1e-3 * whole_us:.2f}", f"{1e-3 * of_one_row['wall_us']:.2f}"]
    assert rows[-1][3] == f"{1e-3 * MODELED_US:.2f}"


def test_without_other_sections_the_goals_stand_alone(options: GpuBenchOptions, tmp_path: Path) -> None:
    for row in rows_of(options, tmp_path, {}):
        assert row[2:4] == ["-", "-"]
