"""Tests that a cuda engine captures nothing that CUDA would refuse, op by op over fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import KvCacheDtype, Quantization
from faser_trtllm.engine.cuda.open import open_cuda_engines
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.opening import OpenRequest
from tests.engine.cuda.fake_cuda import CaptureLint, FakeCudaGpu, fake_cuda
from tests.engine.cuda.harness import HEADS, build_moe_pair, build_pair, build_with_head

# Of the fake tensors themselves: their addresses are asked for, and are 0.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
LIMITS = BuildConfig(max_batch_size=4, max_num_tokens=32, max_seq_len=128, max_draft_len=4, tokens_per_block=32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,))


def capture(engines: EngineDir, **options: Any) -> CaptureLint:
    """All graphs of a target and its draft, on the whole GPU and on their sides of it."""
    with fake_cuda() as lint, ExitStack() as stack:
        opened = open_cuda_engines(OpenRequest(engines, LIMITS, 24, True, **options), FakeCudaGpu(lint), stack)
        assert opened.draft is not None
        assert lint.num_captures == len(opened.target.graphs) + len(opened.draft.graphs)
    return lint


def test_a_pair_in_bf16(pair: EngineDir) -> None:
    lint = capture(pair)
    assert lint.ops["aten.mm.dtype_out"] > 0, "logits by the product that only CUDA has"


def test_a_deterministic_target_calls_no_product_of_torch_s(pair: EngineDir) -> None:
    products = ("aten.mm.default", "aten.mm.dtype_out", "aten.addmm_.default")
    plain, deterministic = (capture(pair, deterministic=way) for way in (False, True))
    draft_alone = [deterministic.ops[name] for name in products]
    assert all(0 < found < plain.ops[name] for found, name in zip(draft_alone, products, strict=True))


def test_a_pair_in_fp8(pair: EngineDir) -> None:
    lint = capture(pair, quantization=Quantization.FP8, kv_dtype=KvCacheDtype.FP8)
    assert lint.ops["aten._scaled_mm.default"] > 0


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    lint = capture(build_moe_pair(tmp_path, exit_layers=(1,)))
    assert lint.ops["aten._grouped_mm.default"] > 0
    assert lint.ops["aten._grouped_mm.default"] % 2 == 0


@pytest.mark.parametrize(("quantization", "deterministic"), [("none", True), ("mxfp4", False)])
def test_a_mixture_of_experts_with_products_of_ours(tmp_path: Path, quantization: str, deterministic: bool) -> None:
    lint = capture(build_moe_pair(tmp_path, exit_layers=(1,), quantization=quantization), deterministic=deterministic)
    assert lint.ops["aten._grouped_mm.default"] == 0


def test_a_block_drafter(tmp_path: Path) -> None:
    lint = capture(build_with_head(tmp_path, **HEADS["dflash2"]))
    assert lint.ops["aten.searchsorted.Tensor"] > 0, "blocks are set up on the device"
    assert lint.ops["aten.topk.default"] > 0


def test_a_head(tmp_path: Path) -> None:
    engines = build_with_head(tmp_path, exit_layers=(2,), **HEADS["eagle31"])
    assert capture(engines).ops["aten.mm.dtype_out"] > 0


HOST = torch.zeros(1, 1)
FORBIDDEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a number": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "a shape": (lambda x: x[x > 0], "nonzero"),
    "a copy to the host": (lambda x: x.cpu(), r"_to_copy.* works on \['cpu', 'cuda'\]"),
    "a copy from the host": (lambda x: x.copy_(HOST), r"copy_.* works on \['cpu', 'cuda'\]"),
    "an operand of the host": (lambda x: x + HOST, "at least two devices"),
    "work of the host": (lambda x: HOST.sum(), r"sum.* works on \['cpu'\]"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_capture_forbids_is_found(name: str, pair: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that is captured, as somebody may write it there."""
    forbidden, message = FORBIDDEN[name]
    silu = Ops.gated_silu

    def changed(self: Ops, gate_up: torch.Tensor, *rest: Any) -> torch.Tensor:
        forbidden(gate_up)
        return silu(self, gate_up, *rest)

    monkeypatch.setattr(Ops, "gated_silu", changed)
    with pytest.raises(Exception, match=message):
        capture(pair)
