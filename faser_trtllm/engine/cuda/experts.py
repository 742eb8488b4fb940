"""A mixture of experts in device memory: a decoder whose MLPs are experts.

Pairs of a row and one of its experts are sorted by expert on the device. The host reads only a count of experts, with
the next result that it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser_trtllm.config import Quantization
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda.decoder import TorchDecoder
from faser_trtllm.engine.cuda.weights import DeviceWeights, LayerWeights
from faser_trtllm.engine.gpu.batch import TokenRows
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.errors import ConfigError
from faser_trtllm.models.experts import SOFTMAX
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows

if TYPE_CHECKING:
    from torch import Tensor


class ExpertsDecoder(TorchDecoder):
    """Decoder (engine/gpu/decoder.py) over a mixture's weights."""

    def _allocate(
        self, weights: DeviceWeights, spec: EngineSpec, runtime: Runtime, token_rows: TokenRows | None
    ) -> None:
        super()._allocate(weights, spec, runtime, token_rows)
        router, self._choice = weights.layers[0].router, choice_of(weights.sizes["experts"])
        assert router is not None, "a mixture has a router"
        self._routes = Routes.of(spec.max_num_tokens, router.shape[0], self._choice, runtime.device)
        self._routes_of: dict[int, Routes] = {}  # by number of rows
        self.num_distinct = self._routes.num_distinct
        self._num_used = self.batch.cu_q_lens[-1:]  # rows after the last request's are dummies

    def close(self) -> None:
        super().close()
        del self._routes, self._routes_of, self._num_used, self.num_distinct

    def _add_mlp(self, layer: LayerWeights, hidden: Tensor, scaled: ScaledRows | None) -> ScaledRows | None:
        import torch

        ops, num_used, routes = self._ops, self._num_used, self._first_routes(hidden.shape[0])
        assert layer.post_norm is not None, "a mixture's norm is apart"
        assert layer.router is not None, "a mixture has a router"
        assert not isinstance(layer.gate_up, ScaledRows), "experts are not quantized"
        assert not isinstance(layer.down, ScaledRows), "experts are not quantized"
        normed = ops.rms_norm(hidden, layer.post_norm, self._eps)
        is_first = layer is self.weights.layers[0]
        ops.route_rows(normed, layer.router, layer.router_bias, num_used, self._choice, is_first, routes)
        gate_up = ops.grouped_linear(torch.index_select(normed, 0, routes.rows), layer.gate_up, routes.ends)
        if layer.gate_up_bias is None:
            inner = self._silu(gate_up)
        else:
            inner = ops.clamped_swiglu(gate_up, layer.gate_up_bias, routes.ends)
        outputs = ops.grouped_linear(inner, layer.down, routes.ends)
        shared: Tensor | None = None
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            shared = ops.linear(self._silu(ops.linear(normed, layer.shared_gate_up)), layer.shared_down)
        ops.combine_rows(outputs, routes, layer.down_bias, shared, num_used, hidden)
        return None

    def _silu(self, gate_up: Tensor) -> Tensor:
        return self._ops.gated_silu(gate_up, self._ones[: gate_up.shape[0]], None, 0.0)

    def _first_routes(self, rows: int) -> Routes:
        found = self._routes_of.get(rows)
        if found is None:
            found = self._routes_of[rows] = self._routes.first(rows)
        return found


def choice_of(experts: Mapping[str, Any]) -> Choice:
    """Return the routing of an engine file. experts: the `experts` object of its header (models/experts.py)."""
    over_all = experts["scoring"] == SOFTMAX and not experts["norm_topk"]
    return Choice(experts["num_experts"], experts["top_k"], over_all)


def check_mixture(path: str, quantization: Quantization) -> None:
    """Raise ConfigError unless the cuda backend runs this directory's mixture with this quantization."""
    if quantization is not Quantization.NONE:
        raise ConfigError(
            f"quantization is {quantization.value}, but {path} has a mixture of experts, whose grouped products are in "
            "bfloat16; set quantization to none"
        )
