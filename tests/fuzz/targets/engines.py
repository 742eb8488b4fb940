"""Engine directories, and the engine files of the three kinds of backends."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import struct
from typing import Any

import numpy as np

from faser_trtllm.builder.cuda_engine_file import ITEMSIZES, CudaFile, tensor_shapes, type_of, write_cuda_file
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.engine_file import MAGIC, VERSION, EngineFile, tensor_sizes, write_engine_file
from faser_trtllm.builder.network.options import NetworkOptions, TensorSpec
from faser_trtllm.builder.plan_file import (
    EARLY_EXIT,
    SEGMENT,
    PlanFile,
    PlanFileWriter,
    PlanInfo,
    Requirements,
    describe,
)
from faser_trtllm.builder.plan_file import MAGIC as PLAN_MAGIC
from faser_trtllm.errors import FaserError
from faser_trtllm.models.experts import CLAMPED, TOP_K_SOFTMAX, ExpertsConfig
from faser_trtllm.models.quantized_weight import Scheme
from tests.fuzz.scratch import JSON, folder, from_json, headed, put, to_json
from tests.fuzz.target import Codec, Target

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_seq_len": 64,
    "windows": [0],
    "rms_norm_eps": 1e-5,
    "rope_attention_factor": 1.0,
    "tied": False,
}
EAGLE3 = {"num_features": 64, "draft_vocab_size": 32, "norm_before_residual": 0, "layers": [0, 1]}
EAGLE31 = EAGLE3 | {"feeds_normed": 1, "num_fc_norms": 2}
MTP = EAGLE3 | {"num_features": 32, "draft_vocab_size": 64, "is_mtp": 1, "reads_normed": 1, "layers": [1]}
MEDUSA = {"num_heads": 2, "num_layers": 1}


# cpu


def run_cpu(data: bytes) -> None:
    with EngineFile.open(put("cpu/rank0.engine", data)) as file:
        for name in (*file.header["tensors"], "none"):
            if file.address(name) is not None:
                file.array(name, np.uint8)


def cpu_seeds() -> list[bytes]:
    found = []
    for more, scheme in (
        ({}, None),
        ({"tied": True}, Scheme(4, 32)),
        ({"head": EAGLE3}, None),
        ({"head": EAGLE31, "num_layers": 2}, None),
        ({"head": MTP}, None),
        ({"medusa": MEDUSA}, None),
    ):
        model, path = MODEL | more, folder("cpu-seed") / "rank0.engine"
        sizes = tensor_sizes(model, scheme)
        zeros = ((name, np.zeros(size, np.uint8)) for name, (size, required) in sizes.items() if required)
        write_engine_file(path, model, [0, model["num_layers"]], zeros, scheme=scheme)
        data = path.read_bytes()
        found.append(data)
    return found


def _decode_cpu(data: bytes) -> Any:
    """[header, its length in the file, what follows it]."""
    *_, length = _CPU_PREFIX.unpack_from(data)
    end = _CPU_PREFIX.size + length
    return [json.loads(data[_CPU_PREFIX.size : end]), length, data[end:]]


def _encode_cpu(value: Any) -> bytes:
    header, length, rest = value
    if isinstance(header, dict) and isinstance(header.get("file_size"), int):
        header["file_size"] = _CPU_PREFIX.size + length + len(rest)
    text = to_json(header).ljust(min(length, 1 << 16))
    return _CPU_PREFIX.pack(MAGIC, VERSION, len(text)) + text + rest


_CPU_PREFIX = struct.Struct("<8sII")


# cuda

MIXTURE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "has_sinks": True,
    "experts": ExpertsConfig(2, 1, 32, TOP_K_SOFTMAX, False, CLAMPED, has_bias=True).sizes(),
}


def run_cuda(data: bytes) -> None:
    with CudaFile.open(put("cuda/rank0.engine", data)) as file:
        for name in tensor_shapes(file.model):
            file.array(name)
        with contextlib.suppress(KeyError):
            file.array("none")


def cuda_seeds() -> list[bytes]:
    found = []
    head = EAGLE3 | {"target_ids": 1}
    for more, dtype in (
        ({}, "bfloat16"),
        ({"tied": True}, "float16"),
        ({"num_outputs": 1}, "bfloat16"),
        ({"head": head}, "float32"),
        ({"head": head | EAGLE31, "num_layers": 2}, "bfloat16"),
        ({"head": MTP}, "bfloat16"),
        ({"medusa": MEDUSA}, "bfloat16"),
        (MIXTURE, "bfloat16"),
        (MIXTURE | {"expert_quantization": "mxfp4"}, "bfloat16"),
    ):
        model, path = MODEL | more, folder("cuda-seed") / "rank0.engine"
        sizes = {
            name: int(np.prod(shape)) * ITEMSIZES[type_of(name, dtype)] for name, shape in tensor_shapes(model).items()
        }
        sources = [(name, functools.partial(np.zeros, size, "u1")) for name, size in sizes.items()]
        write_cuda_file(path, model, [0, model["num_layers"]], dtype, sources, lambda name: None)
        found.append(path.read_bytes())
    return found


_cuda_file = headed(struct.Struct("<Q"), ())


def _decode_cuda(data: bytes) -> Any:
    header, rest = _cuda_file.decode(data)
    with contextlib.suppress(Exception):
        header["__metadata__"]["faser"] = json.loads(header["__metadata__"]["faser"])
    return [header, rest]


def _encode_cuda(value: Any) -> bytes:
    header, rest = value
    with contextlib.suppress(Exception):
        ours = header["__metadata__"]["faser"]
        header["__metadata__"]["faser"] = ours if isinstance(ours, str) else to_json(ours).decode()
    return _cuda_file.encode([header, rest])


# plans


def run_plan(data: bytes) -> None:
    with PlanFile.open(put("plan/rank0.engine", data)) as file:
        for plan in (*file.segments, *filter(None, (file.early_exit,))):
            describe(plan.info)
            with contextlib.suppress(FaserError):
                file.view(plan).release()
            file.view(plan, verify=False).release()
        file.network.dimension_ranges(16)
        [spec.trt_shape for plan in file.plans for spec in plan.info.inputs if spec.is_dynamic]


def plan_seeds() -> list[bytes]:
    network = NetworkOptions("bfloat16", 4, 64, 96, 96, 64, profile_rows=(16,))
    needs = Requirements("tensorrt_rtx", "1.7.1.116", ("8.6", "12.0"), portable=False)
    found = []
    for early in (False, True):
        path = folder("plan-seed") / "rank0.engine"
        with PlanFileWriter(path, needs, network) as writer:
            for kind, first, last in [(SEGMENT, 0, 3), (SEGMENT, 3, 4), (EARLY_EXIT, 0, 4)][: 2 + early]:
                inputs = (
                    TensorSpec("token_ids", "int32", ("rows",)),
                    TensorSpec("k_cache_0", "bfloat16", ("batch", 2, 96)),
                )
                outputs = (TensorSpec("hidden_out", "bfloat16", ("rows", 64)),)
                profiles = ({"token_ids": ((1,), (16,), (16,))},)
                info = PlanInfo(
                    kind, first, last, "native", "ab" * 32, inputs, outputs, ("faser::append_kv",), profiles
                )
                writer.add(info, memoryview(b"plan"))
        found.append(path.read_bytes())
    return found


_PREFIX = struct.Struct("<8sIIQQ32s")


def _decode_plan(data: bytes) -> Any:
    _, _, _, offset, length, _ = _PREFIX.unpack_from(data)
    return [data[_PREFIX.size : offset], json.loads(data[offset : offset + length])]


def _encode_plan(value: Any) -> bytes:
    plans, table = value
    text = to_json(table)
    place = _PREFIX.size + len(plans)
    return _PREFIX.pack(PLAN_MAGIC, 1, 0, place, len(text), hashlib.sha256(text).digest()) + plans + text


# directories


def run_engine_dir(data: bytes) -> None:
    """The input is an object of files' contents by name; sizes in the manifest are mended."""
    files = from_json(data, dict)
    path = folder("engine-dir")
    for name in ("target/config.json", "draft/config.json", "manifest.json"):
        content = files.get(name)
        if name == "manifest.json" and isinstance(content, dict) and isinstance(content.get("files"), dict):
            for known, entry in content["files"].items():
                if known in files and isinstance(entry, dict):
                    there = (path / known).read_bytes() if (path / known).is_file() else b""
                    entry |= {"bytes": len(there), "sha256": hashlib.sha256(there).hexdigest()}
        put(f"engine-dir/{name}", content.encode(errors="replace") if isinstance(content, str) else to_json(content))
    for verify in (False, True):
        found = EngineDir.load(path, verify_hashes=verify)
        _use(found)


def _use(found: EngineDir) -> None:
    _ = (
        found.backend,
        found.has_draft,
        found.vocab_size,
        found.draft_head,
        found.read_layers,
        found.tp_size,
        found.draft_window,
    )
    found.kv_bytes_per_token()
    found.kv_bytes_per_token(2)
    if found.has_draft:
        assert found.draft_path.name == found.target_path.name


def engine_dir_seeds() -> list[bytes]:
    build = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 96, "max_draft_len": 4}
    pretrained: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_size": 16}
    pretrained |= {"dtype": "bfloat16", "hidden_size": 32, "mapping": {"tp_size": 1}, "max_position_embeddings": 96}
    target = {"build_config": build | {"plugin_config": {"tokens_per_block": 16}}, "pretrained_config": pretrained}
    names = ("target/config.json", "draft/config.json")
    found = []
    target["faser"] = {"role": "target"}
    for faser in (
        None,
        {},
        {"eagle3": {"layers": [0, 1], "num_features": 64}},
        {"medusa": {}},
        {"mtp": {"num_features": 32}},
    ):
        files: dict[str, Any] = {"target/config.json": target}
        if faser is not None:
            files["draft/config.json"] = target | {"faser": faser}
        checkpoints = {name.split("/")[0]: {} for name in files}
        entries = {name: {"bytes": 0, "sha256": ""} for name in files if name in names}
        files["manifest.json"] = {"format": 1, "files": entries, "checkpoints": checkpoints, "backend": "cpu"}
        found.append(json.dumps(files).encode())
    return found


_WORDS = (
    *MODEL,
    *EAGLE31,
    *MEDUSA,
    "head",
    "medusa",
    "is_mtp",
    "reads_normed",
    "target_ids",
    "num_outputs",
    "output_ids",
    "quantization",
    "segments",
)

TARGETS = (
    Target(
        "cpu_engine",
        run_cpu,
        cpu_seeds,
        ("builder/engine_file.py",),
        Codec(_decode_cpu, _encode_cpu),
        words=_WORDS,
    ),
    Target(
        "cuda_engine",
        run_cuda,
        cuda_seeds,
        ("builder/cuda_engine_file.py", "models/safetensors_file.py"),
        Codec(_decode_cuda, _encode_cuda),
        words=_WORDS,
    ),
    Target(
        "plan_engine",
        run_plan,
        plan_seeds,
        ("builder/plan_file.py", "builder/network/options.py"),
        Codec(_decode_plan, _encode_plan),
    ),
    Target("engine_dir", run_engine_dir, engine_dir_seeds, ("builder/engine_dir.py",), JSON, words=("eagle3", "mtp")),
)
