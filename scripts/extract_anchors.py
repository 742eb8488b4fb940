"""Extracts the cost model's anchors (lab/costmodel/data/anchors.json) from NVIDIA's measured operator tables.

Needs Python 3.11 to 3.13 with `pip install aiconfigurator-core==0.12.0` (Apache-2.0) and this checkout on PYTHONPATH:

    python scripts/extract_anchors.py anchors.json

Per GPU and model it asks the package what the operators of a pass take: the matrices of all layers, the LM head,
elementwise kernels and all-reduces by rows; decode attention by batch and context; prompts by length, to check against.
The package estimates nothing here: what it does not have as measured is left out.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lab.costmodel.anchors import ANCHORED
from lab.costmodel.gpu import GPUS
from lab.costmodel.shape import ModelShape

PACKAGE = "aiconfigurator-core"
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "a100": "a100_sxm", "l40s": "l40s"}
BACKEND = "trtllm"
ROWS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 257, 320, 384, 448, 512, 640, 768]
ROWS += [896, 1024, 1280, 1536, 2048, 2560, 3072, 4096]
BATCH = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
CONTEXTS = [127, 255, 511, 1023, 2047, 4095, 8191, 16383]
PROMPTS = [128, 512, 1024, 2048, 4096]


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    version = importlib.metadata.version(PACKAGE)
    found: dict[str, Any] = {
        "source": f"{PACKAGE} {version} (Apache-2.0), silicon tables",
        "rows": ROWS,
        "batch": BATCH,
        "ctx": CONTEXTS,
        "gpus": {name: {} for name in GPUS},
    }
    with tempfile.TemporaryDirectory() as folder:
        for gpu in GPUS.values():
            for name, shape in ANCHORED.items():
                if shape.weight_bytes == 1 and not gpu.has_fp8:
                    continue
                try:
                    found["gpus"][gpu.name][name] = operators(SYSTEMS[gpu.name], shape, Path(folder) / name)
                except Exception as error:  # the package raises what it likes where it has no table
                    print(f"{gpu.name} {name}: left out, {type(error).__name__}: {error}"[:200], file=sys.stderr)
    Path(sys.argv[1]).write_text(json.dumps(found))


def operators(system: str, shape: ModelShape, folder: Path) -> dict[str, Any]:
    """Measured times of one model on one GPU, in ms."""
    from aiconfigurator_core.sdk.engine import EngineHandle

    write_config(shape, folder)
    quant = "fp8" if shape.weight_bytes == 1 else "bfloat16"
    handle = EngineHandle.compile(
        str(folder),
        system,
        BACKEND,
        tp_size=shape.num_gpus,
        gemm_quant_mode=quant,
        kvcache_quant_mode=quant,
        fmha_quant_mode="bfloat16",
    )
    by_rows: dict[str, list[float]] = {"gemm": [], "lm": [], "elem": [], "ar": []}
    for rows in ROWS:
        sums = dict.fromkeys(by_rows, 0.0)
        for operator, ms, _, source in handle.decode_step_per_op(rows, 128, 2):
            kind = kind_of(operator)
            if kind == "gemm" and source != "silicon":
                raise ValueError(f"{operator} comes from {source}")
            if kind != "attention":
                sums[kind] += ms
        for kind, total in sums.items():
            by_rows[kind].append(round(total, 5))
    attention = [
        [
            round(sum(ms for op, ms, _, _ in handle.decode_step_per_op(b, c, 2) if kind_of(op) == "attention"), 5)
            for c in CONTEXTS
        ]
        for b in BATCH
    ]
    prompts = {str(n): round(handle.predict_prefill_latency(1, n), 4) for n in PROMPTS}
    return {**by_rows, "attention": attention, "prefill": prompts}


def kind_of(operator: str) -> str:
    """The kind of an operator, by its name in the package."""
    if "logits" in operator:
        return "lm"
    if "gemm" in operator:
        return "gemm"
    if "_ar" in operator or "p2p" in operator:
        return "ar"
    return "attention" if "attention" in operator else "elem"


def write_config(shape: ModelShape, folder: Path) -> None:
    """A checkpoint's config.json, which is all that the package reads."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
