"""An engine that interprets TensorRT networks on the CPU: slow, but with the same networks as on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.network.early_exit import build_early_exit
from faser_trtllm.builder.network.fp8 import Fp8Layers
from faser_trtllm.builder.network.inputs import native_inputs
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork, build_segment
from faser_trtllm.builder.network.vendor import create_network, logger
from faser_trtllm.builder.source import segment_bounds
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.closing import Closing
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.weights import Weights
from faser_trtllm.ops.boundary_checks import check_asked, check_listed
from faser_trtllm.ops.prune_rows import HostPruning
from faser_trtllm.ops.transfer.fill_inputs import check_size, check_tokens
from lab.interpreted.interpreter import Interpreter
from lab.reference.draft_loop import draft_loop

if TYPE_CHECKING:
    import torch


class InterpretedEngine(HostPruning, Closing):
    """Engine (engine/base.py) that interprets the networks of a decoder's segments, native flavour. Not thread-safe.

    The caches are linear: a request has one block of max_seq_len tokens, whose id is its cache row. So there are
    options.max_batch_size blocks, and block tables are [max_batch_size, 1].
    """

    distinct_experts = 0.0  # all models are dense

    def __init__(
        self,
        trt: Any,
        config: ModelConfig,
        weights: Weights,
        options: NetworkOptions,
        exit_layers: Sequence[int] = (),
        fp8: Fp8Layers | None = None,
    ) -> None:
        """trt: the module from load_tensorrt(). fp8: quantizes the layers. Raises what build_segment() raises. The
        weights may be closed afterwards."""
        self._trt = trt
        self._config = config
        self._options = options
        segments = segment_bounds(exit_layers, config.num_layers)
        self._spec = EngineSpec(
            vocab_size=config.vocab_size,
            max_seq_len=options.max_seq_len,
            num_layers=config.num_layers,
            num_blocks=options.max_batch_size,
            tokens_per_block=options.tokens_per_block,
            max_num_tokens=options.max_num_tokens,
            max_batch_size=options.max_batch_size,
            segments=segments,
        )
        self._builder = trt.Builder(logger(trt))
        self._segments: list[Interpreter] = []
        self._caches: list[dict[str, torch.Tensor]] = []
        for first, last in pairwise(segments):
            segment = build_segment(trt, self._network(), config, weights, first, last, options, fp8)
            self._segments.append(Interpreter(trt, segment.network, segment.weights))
            self._caches.append(_empty_caches(segment))
        self._exit = None
        if len(segments) > 2:
            segment = build_early_exit(trt, self._network(), config, weights, options)
            self._exit = Interpreter(trt, segment.network, segment.weights)
        self._hidden: torch.Tensor | None = None  # between two segments, in the order of the batch

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        import torch

        num_segments = len(self._segments)
        if not num_segments:
            raise ValueError("the engine is closed")
        if not 0 <= segment < num_segments:
            raise InvalidArgumentError(f"segment is {segment}, allowed is 0 to {num_segments - 1}")
        is_last = segment == num_segments - 1
        if batch.num_rows == 0:
            return np.zeros((0, self._spec.vocab_size), np.float32) if is_last else None
        check_size(batch, self._spec.max_num_tokens, self._spec.max_batch_size)
        check_tokens(batch, self._spec.vocab_size)
        inputs = native_inputs(
            batch,
            batch.block_table[batch.slots, 0],
            self._spec.max_batch_size,
            self._spec.max_seq_len,
        )
        order = torch.from_numpy(inputs.order)
        feeds = dict(self._caches[segment])
        for name, array in inputs.arrays.items():
            if name in self._segments[segment].input_names:
                feeds[name] = torch.from_numpy(np.ascontiguousarray(array))
        num_logits = batch.logit_rows.size
        if is_last and not num_logits:
            feeds["logit_rows"] = torch.zeros(1, dtype=torch.int32)  # networks need at least one
        if segment:
            feeds["hidden_in"] = self._hidden_rows(batch.num_rows)[order]
        outputs = self._segments[segment].run(feeds)
        if is_last:
            self._hidden = None
            logits: npt.NDArray[np.float32] = outputs["logits"][:num_logits].float().numpy()
            return logits
        self._hidden = torch.empty_like(outputs["hidden_out"])
        self._hidden[order] = outputs["hidden_out"]
        return None

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        logits = None
        for segment in range(len(self._segments)):
            logits = self.run_segment(batch, segment)
        assert logits is not None
        return logits

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        import torch

        hidden = self._hidden_rows(None)
        check_listed(rows, len(hidden))
        self._hidden = hidden[torch.from_numpy(np.ascontiguousarray(rows, np.int32))]

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        import torch

        hidden, limit = self._hidden_rows(None), self._options.num_candidates
        check_asked(rows, candidates, len(hidden), self._spec.vocab_size, limit)
        if not rows.size:
            return np.zeros(candidates.shape, np.float32)
        padded = np.full((rows.size, limit), -1, np.int32)
        padded[:, : candidates.shape[1]] = candidates
        assert self._exit is not None  # hidden rows exist only between segments
        feeds = {
            "hidden_in": hidden,
            "exit_rows": torch.from_numpy(np.ascontiguousarray(rows, np.int32)),
            "candidates": torch.from_numpy(padded),
        }
        scores: npt.NDArray[np.float32] = self._exit.run(feeds)["scores"].numpy()
        kept: npt.NDArray[np.float32] = scores[:, : candidates.shape[1]].copy()
        return kept

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        return draft_loop(self.forward, self._spec.vocab_size, draft_batch)

    def close(self) -> None:
        """Free the networks and their caches."""
        self._segments, self._caches, self._exit, self._hidden, self._builder = [], [], None, None, None

    def _network(self) -> Any:
        return create_network(self._trt, self._builder)

    def _hidden_rows(self, num_rows: int | None) -> torch.Tensor:
        if self._hidden is None:
            raise InvalidArgumentError("there are no hidden rows, run a segment that is not the last one first")
        if num_rows not in (None, len(self._hidden)):
            raise InvalidArgumentError(f"the batch has {num_rows} rows, the segment before left {len(self._hidden)}")
        return self._hidden


def _empty_caches(segment: SegmentNetwork) -> dict[str, torch.Tensor]:
    import torch

    dtype = getattr(torch, segment.options.dtype)
    return {
        spec.name: torch.zeros([segment.options.max_batch_size, *spec.trt_shape[1:]], dtype=dtype)
        for spec in segment.inputs
        if "_cache_" in spec.name
    }
