"""Extracts the cost model's experts (lab/costmodel/data/experts.json) from NVIDIA's measured operator tables.

Needs `pip install pyarrow pandas`, this checkout on PYTHONPATH, and the unzipped wheel of aiconfigurator-core 0.12.0
(Apache-2.0; `pip download --no-deps aiconfigurator-core==0.12.0`):

    python scripts/extract_experts.py WHEEL experts.json

Per GPU and model it fits ms = fixed + distinct experts x ms per expert to the rows whose experts are all different (the
tables' distribution "balanced"), and keeps what further rows add. A table whose fit is off by more than MAX_ERROR (some
of the L40S, whose cache holds a row's experts from one run to the next), or that has too few rows, is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.costmodel.experts import ANCHORED
from lab.costmodel.gpu import GPUS
from lab.costmodel.shape import ModelShape

SOURCE = "aiconfigurator-core 0.12.0 (Apache-2.0), silicon tables"
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "a100": "a100_sxm", "l40s": "l40s"}
TABLES = {
    2.0: (("bfloat16", "trtllm"), ("bfloat16", "sglang")),
    1.0: (("fp8", "trtllm"),),
    0.53125: (("w4a8_mxfp4_mxfp8", "trtllm"), ("w4a16_mxfp4", "vllm")),
}
"""The tables' names of the type, and the engine, by bytes of a weight; the first that has the experts is taken."""
MAX_ERROR, MIN_ROWS = 0.1, 3
MAX_ROWS = 4096


def main() -> None:
    folder, target = Path(sys.argv[1]) / "aiconfigurator_core/systems/data", Path(sys.argv[2])
    gpus: dict[str, dict[str, Any]] = {}
    for gpu in GPUS.values():
        for name, shape in ANCHORED.items():
            found = newest(folder / SYSTEMS[gpu.name] / "moe", shape)
            if found is None:
                print(f"{gpu.name} {name}: left out, no table", file=sys.stderr)
                continue
            version, times, error = found
            print(f"{gpu.name} {name}: {version}, worst error {error:.1%}", file=sys.stderr)
            gpus.setdefault(gpu.name, {})[name] = times
    lines = [
        f'  "{gpu}": {{\n' + ",\n".join(f'   "{name}": {json.dumps(times)}' for name, times in models.items()) + "\n  }"
        for gpu, models in gpus.items()
    ]
    target.write_text(f'{{\n "source": {json.dumps(SOURCE)},\n "gpus": {{\n' + ",\n".join(lines) + "\n }\n}\n")


def newest(folder: Path, shape: ModelShape) -> tuple[str, dict[str, Any], float] | None:
    """The newest table that has these experts, fitted, with the worst error of its fit."""
    assert shape.experts is not None
    for dtype, engine in TABLES[shape.experts.value_bytes]:
        for path in sorted((folder / engine).glob("*/moe_perf.parquet"), reverse=True):
            found = fit(read(path, shape, dtype), shape)
            if found is not None:
                return f"{engine} {path.parent.name}, {dtype}", *found
    return None


def read(path: Path, shape: ModelShape, dtype: str) -> pd.Series:
    """ms by rows."""
    assert shape.experts is not None
    experts = shape.experts
    table = pd.read_parquet(path)
    wanted = {
        "hidden_size": shape.hidden_size,
        "inter_size": experts.intermediate_size,
        "topk": experts.routing.top_k,
        "num_experts": experts.routing.num_experts,
        "moe_dtype": dtype,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        "distribution": "balanced",
    }
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table.groupby("num_tokens")["latency"].mean().sort_index()


def fit(by_rows: pd.Series, shape: ModelShape) -> tuple[dict[str, Any], float] | None:
    assert shape.experts is not None
    routing = shape.experts.routing
    rows, ms = by_rows.index.to_numpy(float), by_rows.to_numpy(float)
    few = rows * routing.top_k <= routing.num_experts
    if few.sum() < MIN_ROWS:
        return None
    design = np.column_stack([np.ones(few.sum()), rows[few] * routing.top_k]) / ms[few, None]
    fixed, each = np.linalg.lstsq(design, np.ones(few.sum()), rcond=None)[0]
    error = float(np.abs(design @ [fixed, each] - 1.0).max())
    if error > MAX_ERROR:
        return None
    extra_ms = np.maximum(0.0, ms[~few] - (fixed + each * routing.num_experts))
    least_ms = np.minimum.accumulate(extra_ms[::-1])[::-1]  # what takes longer than more rows do is noise
    points = [[routing.num_experts // routing.top_k, 0.0]]
    points += [[int(n), round(float(t), 5)] for n, t in zip(rows[~few], least_ms, strict=True) if n <= MAX_ROWS]
    return {"fixed_ms": round(float(fixed), 6), "expert_ms": round(float(each), 7), "more": points}, error


if __name__ == "__main__":
    main()
