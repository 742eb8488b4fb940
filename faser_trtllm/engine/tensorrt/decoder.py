"""A GPU engine's layers as compiled plans: one per segment, and one for the early exit. Not run on a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.network.options import TensorSpec, hidden_output
from faser_trtllm.builder.plan_file import EARLY_EXIT, PlanFile
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
from faser_trtllm.engine.gpu.batch import DeviceBatch
from faser_trtllm.engine.gpu.decoder import Bounds, Placement
from faser_trtllm.engine.tensorrt.linear_batch import LinearBatch
from faser_trtllm.engine.tensorrt.plans import PassShape, Plans

if TYPE_CHECKING:
    from torch import Tensor

_CACHE_OUTPUT = re.compile(r"([kv]_cache)_out(_\d+)")
_OWNED = re.compile(r"[kv]_cache_\d+|hidden_\d+|logits")
_EXIT_TENSORS = ("exit_rows", "candidates", "places", "before", "cu_drafts", "starts", "rule", "scores", "kept")
_QUERY_BUCKET = 4  # query rows per request are padded to a power of this


class PlanDecoder:
    """Decoder (engine/gpu/decoder.py) over the plans of one engine file.

    Segments alternate between two buffers of hidden rows: each reads one and writes the other. A cache output is bound
    to its input's memory, so that caches are updated in place.
    """

    has_fixed_shapes = True
    has_kv = True
    num_distinct = None

    def __init__(
        self,
        file: PlanFile,
        plans: Plans,
        place: Placement,
        spec: EngineSpec,
        max_logit_rows: int,
        hidden_rows: HiddenRows | None = None,
    ) -> None:
        """file, plans: closed with the decoder. max_logit_rows: limit per pass. hidden_rows: where passes keep rows
        for a head."""
        import torch

        self._file = file
        self._plans = plans
        self._runtime = runtime = place.runtime
        self._options = file.network
        self._is_linear = file.segments[0].info.flavour == "native"
        self._max_logit_rows = min(max_logit_rows, spec.max_num_tokens)
        self._num_blocks = spec.num_blocks
        self._num_slots = file.network.max_batch_size if self._is_linear else spec.max_batch_size
        self._max_num_tokens, self._max_seq_len = spec.max_num_tokens, spec.max_seq_len
        self._hidden_rows = hidden_rows
        read = file.network.read_layers
        names = [{spec.name for spec in plan.info.outputs} for plan in file.segments]
        self._given = [[layer for layer in read if hidden_output(layer) in given] for given in names]
        token_rows = None if hidden_rows is None else hidden_rows.own_rows
        with runtime.on(place.partition), torch.no_grad():
            # The network fixes the width of the block table, for any max_seq_len that it is opened with.
            self.batch: DeviceBatch | LinearBatch = (
                LinearBatch(runtime, spec, file.network, token_rows)
                if self._is_linear
                else DeviceBatch(runtime, spec, file.network.max_blocks_per_seq, token_rows)
            )
            self._tensors = self._allocate()
            width = (
                next(spec.shape[1] for spec in file.segments[-1].info.inputs if spec.name == "hidden_in")
                if (len(file.segments) > 1)
                else 1
            )
            shape = (2, spec.max_num_tokens, int(width))
            self._hidden = torch.zeros(shape, dtype=getattr(torch, file.network.dtype), device=runtime.device)
            runtime.wait()

    @property
    def weight_bytes(self) -> int:
        return sum(plan.nbytes for plan in self._file.plans)

    @property
    def is_read(self) -> bool:
        return self._hidden_rows is not None

    def hidden(self, segment: int) -> Tensor:
        return self._hidden[segment % 2]

    def query_rows(self, num_query_rows: int, rows: int) -> int:
        """See Decoder.query_rows. Native attention pads all requests to the longest; our plugins do not pad."""
        if not self._is_linear:
            return 1
        bucket = 1
        while bucket < num_query_rows:
            bucket *= _QUERY_BUCKET
        return min(bucket, rows, self._options.max_query_rows)

    def kv_lens(self) -> tuple[int, ...]:
        return (self._max_seq_len,)

    def run(self, rows: int, first: int, last: int, bounds: Bounds) -> None:
        shape, stream = PassShape(rows, self.query_rows(bounds.max_query_rows, rows)), self._runtime.stream()
        for segment in range(first, last):
            if segment:
                self._keep(self._file.segments[segment].info.first, self.hidden(segment - 1), rows)
            self._plans.run(segment, shape, stream, lambda number=segment: self._bound(number, number, shape))  # type: ignore[misc]
            for layer in self._given[segment]:
                self._keep(layer, self._tensors[hidden_output(layer)], rows)

    def write_logits(self, logits: Tensor) -> None:
        logits.copy_(self._tensors["logits"][: logits.shape[0]])

    def step(self, rows: int, bounds: Bounds, logits: Tensor) -> None:
        self.run(rows, 0, len(self._file.segments), bounds)
        self.write_logits(logits)

    def early_exit(self, segment: int, num_hidden: int, rows: Tensor, candidates: Tensor, out: Tensor) -> None:
        n, width = candidates.shape
        asked, scored = self._tensors["exit_rows"], self._tensors["candidates"]
        asked.zero_()
        scored.fill_(-1)
        asked[:n].copy_(rows)
        scored[:n, :width].copy_(candidates)
        if self.has_prune_plan:
            self._tensors["cu_drafts"].zero_()  # so that no row is dropped
        self._run_exit(segment, num_hidden)
        out.copy_(self._tensors["scores"][:n, :width])

    @property
    def has_prune_plan(self) -> bool:
        return "kept" in self._tensors

    def prune(self, segment: int, rows: int, inputs: Mapping[str, Tensor], kept: Tensor) -> None:
        tensors, num_requests = self._tensors, kept.shape[0]
        num_drafts = inputs["places"].shape[0]
        tensors["exit_rows"].zero_()
        tensors["candidates"].fill_(-1)
        tensors["cu_drafts"].fill_(num_drafts)  # unused requests have no drafts
        for name, values in inputs.items():
            target = tensors[name]
            width = values.shape[1:] and slice(0, values.shape[1])
            (target[: values.shape[0], width] if width else target[: values.shape[0]]).copy_(values)
        self._run_exit(segment, rows)
        self._hidden[segment % 2][:rows].copy_(self._hidden[(segment + 1) % 2][:rows])
        kept.copy_(tensors["kept"][:num_requests])

    def copy_kv(self, copies: Tensor) -> None:
        raise NotImplementedError("compiled plans have no branches")

    def close(self) -> None:
        self._plans.save_caches()
        self._plans.close()
        self._file.close()
        self._tensors = {}
        del self.batch, self._hidden, self._hidden_rows

    def _keep(self, layer: int, hidden: Tensor, rows: int) -> None:
        if self._hidden_rows is not None:
            self._hidden_rows.keep(layer, self.batch.token_rows[:rows], hidden[:rows])

    def _run_exit(self, segment: int, rows: int) -> None:
        # query_rows stands for the buffer of hidden rows here, so that each buffer has its own context.
        index, shape = len(self._file.segments), PassShape(rows, segment % 2)
        self._plans.run(index, shape, self._runtime.stream(), lambda: self._bound(index, segment + 1, shape))

    def _bound(self, index: int, segment: int, shape: PassShape) -> Mapping[str, Tensor]:
        """Return the tensors that plan `index` reads and writes when it runs after segment - 1."""
        info, batch = self._file.plans[index].info, self.batch
        tensors: dict[str, Any] = {
            "hidden_in": self._hidden[(segment - 1) % 2][: shape.rows],
            "hidden_out": self._hidden[segment % 2][: shape.rows],
        }
        if info.kind == EARLY_EXIT:
            tensors |= {"positions": batch.positions[: shape.rows]}
            tensors |= {"cu_q_lens": batch.cu_q_lens, "kv_lens": batch.kv_lens}
            by_row = ("exit_rows", "candidates", "scores", "places", "before")
            own = {name: self._tensors[name] for name in _EXIT_TENSORS if name in self._tensors}
            return tensors | {name: held[: shape.rows] if name in by_row else held for name, held in own.items()}
        num_logits = min(shape.rows, self._max_logit_rows)
        tensors |= {
            "token_ids": batch.token_ids[: shape.rows],
            "positions": batch.positions[: shape.rows],
            "logit_rows": batch.logit_rows[:num_logits],
            "logits": self._tensors["logits"][:num_logits],
            "cu_q_lens": batch.cu_q_lens,
            "kv_lens": batch.kv_lens,
        }
        for layer in self._given[index]:
            name = hidden_output(layer)
            tensors[name] = self._tensors[name][: shape.rows]
        if isinstance(batch, DeviceBatch):
            tensors["block_table"] = batch.block_table
        else:
            tensors["write_idx"] = batch.write_idx
            tensors["pad_idx"] = batch.pad_idx(shape.query_rows)
            tensors["unpad_idx"] = batch.unpad_idx[: shape.rows]
        for spec in (*info.inputs, *info.outputs):
            if spec.name not in tensors:
                tensors[spec.name] = self._tensors[_input_of(spec.name)]
        return tensors

    def _allocate(self) -> dict[str, Tensor]:
        """Allocate caches, logits and the early exit's tensors, zeroed, since masked reads must be finite."""
        import torch

        sizes = {
            "batch": self._num_slots,
            "batch_plus_one": self._num_slots + 1,
            "blocks": self._num_blocks,
            "rows": self._max_num_tokens,
            "logit_rows": self._max_logit_rows,
            "exit_rows": self._max_num_tokens,
        }

        def zeros(spec: TensorSpec) -> Tensor:
            shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
            return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self._runtime.device)

        specs = (spec for plan in self._file.plans for spec in (*plan.info.inputs, *plan.info.outputs))
        return {spec.name: zeros(spec) for spec in specs if spec.name in _EXIT_TENSORS or _OWNED.fullmatch(spec.name)}


def _input_of(name: str) -> str:
    """Return the name of the cache input that an output is bound to; for other tensors, the name itself."""
    match = _CACHE_OUTPUT.fullmatch(name)
    return f"{match[1]}{match[2]}" if match else name
