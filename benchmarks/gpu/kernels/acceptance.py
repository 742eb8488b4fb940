"""Cases of accept: rejection sampling of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.case import KernelCase
from benchmarks.gpu.machine import Machine, num_copies
from faser_trtllm import native
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda import accept
from lab.reference.accept import accept_reference

if TYPE_CHECKING:
    from torch import Tensor

MODES = {"greedy": native.GREEDY, "seeded": native.SEEDED, "sampled": native.SAMPLED}
# Executed by a warp that scans 512 tokens of a part: PTX as interpreted; seeded rows: in the disassembly.
PART_INSTRUCTIONS = {native.GREEDY: 310, native.SEEDED: 810, native.SAMPLED: 440}
VOCAB_SIZE = 128_256
_FIELDS = [field.name for field in fields(AcceptResult) if not field.kw_only]


class AcceptCase:
    """Requests of one mode with max_draft_len pending drafts each, on the device and on the host.

    logits: host fp32 [num_requests * (max_draft_len + 1), vocab_size]. drafts [num_requests, max_draft_len];
    draft_probs: the probabilities they were drawn from, fp32 [num_requests, max_draft_len, vocab_size].
    """

    def __init__(
        self,
        machine: Machine,
        mode: int,
        logits: npt.NDArray[Any],
        drafts: npt.NDArray[Any],
        draft_probs: npt.NDArray[Any],
        keys: Sequence[int],
        **sampling: float,
    ) -> None:
        import torch

        self._machine = machine
        n, max_draft_len = drafts.shape
        self.max_draft_len, self.vocab_size = max_draft_len, logits.shape[1]
        tokens = np.concatenate([np.zeros((n, 1), np.int32), drafts.astype(np.int32)], 1)
        host = [np.ascontiguousarray(tokens), np.ascontiguousarray(draft_probs, np.float32)]
        device = [torch.from_numpy(array).to(machine.device) for array in host]
        self._kept = (host, device)
        self.host_table = self._table(mode, keys, [array.ctypes.data for array in host], sampling)
        table = self._table(mode, keys, [tensor.data_ptr() for tensor in device], sampling)
        bytes_of = np.ascontiguousarray(table).view(np.uint8).reshape(n, SAMPLING_DTYPE.itemsize)
        self.device_table = torch.from_numpy(bytes_of).to(machine.device)
        ints = (
            np.arange(n, dtype=np.int32),
            np.arange(n + 1, dtype=np.int32) * (max_draft_len + 1),
            np.ones(n, np.int32),
            np.full(n, max_draft_len, np.int32),
        )
        self.host_logits, self.host_ints = logits, ints
        self.logits = torch.from_numpy(logits).to(machine.device)
        self._ints = [torch.from_numpy(array).to(machine.device) for array in ints]
        shapes = [(n, max_draft_len + 1), *[(n,)] * 4]
        outputs: list[Any] = [torch.zeros(s, dtype=torch.int32, device=machine.device) for s in shapes]
        self.result = AcceptResult(*outputs)
        self._verdicts = torch.empty((logits.shape[0], 3), dtype=torch.int32, device=machine.device)
        self._stages, num_bytes = accept.stages_of(self.host_table), accept.workspace_bytes(*logits.shape)
        self._workspace = torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=machine.device)

    def _table(
        self, mode: int, keys: Sequence[int], addresses: list[int], sampling: dict[str, float]
    ) -> npt.NDArray[Any]:
        table = np.zeros(len(keys), SAMPLING_DTYPE)
        for name in ("temperature", "top_p", "repetition_penalty", "prompt_len"):
            table[name] = 1
        table["mode"] = mode
        table["key"] = keys
        row_bytes = (4 * (self.max_draft_len + 1), 4 * self.max_draft_len * self.vocab_size)
        for name, address, stride in zip(("tokens", "draft_probs"), addresses, row_bytes, strict=True):
            table[name] = address + stride * np.arange(len(keys), dtype=np.uint64)
        for name, value in sampling.items():
            table[name] = value
        return table

    def launch(self, launcher: Any, logits: Tensor | None = None) -> None:
        slots, cu_rows, num_tokens, num_drafts = self._ints
        accept.accept(
            launcher,
            self.device_table,
            slots,
            self.logits if logits is None else logits,
            self.vocab_size,
            cu_rows,
            num_tokens,
            num_drafts,
            self.max_draft_len,
            result=self.result,
            verdicts=self._verdicts,
            workspace=self._workspace,
            stages=self._stages,
        )

    def reference(self) -> AcceptResult:
        slots, cu_rows, num_tokens, num_drafts = self.host_ints
        return accept_reference(
            self.host_table,
            slots,
            self.host_logits,
            self.vocab_size,
            cu_rows,
            num_tokens,
            num_drafts,
            self.max_draft_len,
        )

    def found(self) -> AcceptResult:
        self._machine.synchronize()
        return AcceptResult(*(getattr(self.result, name).cpu().numpy() for name in _FIELDS))


def accept_cases(bench: Bench) -> Iterator[KernelCase]:
    """Yield cases with 4 drafts per request; top_k and top_p need extra passes."""
    dry = bench.is_dry
    sizes = ((3, 50),) if dry else ((8, VOCAB_SIZE), (64, VOCAB_SIZE), (64, 4096))
    for num_requests, vocab_size in sizes:
        for label, mode in MODES.items():
            yield _accept_case(bench, num_requests, vocab_size, label, mode)
        yield _accept_case(bench, num_requests, vocab_size, "sampled, top_p 0.9", native.SAMPLED, top_p=0.9)


def _accept_case(
    bench: Bench, num_requests: int, vocab_size: int, label: str, mode: int, **sampling: float
) -> KernelCase:
    machine, max_draft_len = bench.machine, 4
    rng = np.random.default_rng(bench.options.seed)
    num_rows = num_requests * (max_draft_len + 1)
    if machine.device == "meta":  # recorded only
        logits = np.zeros((num_rows, vocab_size), np.float32)
    else:
        logits = (3 * rng.standard_normal((num_rows, vocab_size))).astype(np.float32)
    drafts = logits.reshape(num_requests, max_draft_len + 1, -1)[:, :max_draft_len].argmax(-1)
    drafts[::3, -1] = 0  # so that some drafts are rejected at different places
    draft_probs = np.full((num_requests, max_draft_len, vocab_size), 1.0 / vocab_size, np.float32)
    keys = rng.integers(1, 2**62, num_requests).tolist()
    case = AcceptCase(machine, mode, logits, drafts, draft_probs, keys, **sampling)
    launcher = machine.launcher("accept")
    copies = [case.logits, *(case.logits.clone() for _ in range(num_copies(logits.nbytes, machine.l2_bytes) - 1))]

    def check() -> float:
        if launcher is None:
            return 0.0
        case.launch(launcher)
        found, wanted = case.found(), case.reference()
        same = all(np.array_equal(getattr(found, name), getattr(wanted, name)) for name in _FIELDS)
        return 0.0 if same else float("inf")

    calls: tuple[Callable[[], object], ...] | None = None
    if launcher is not None:
        calls = tuple(lambda logits=copy: case.launch(launcher, logits) for copy in copies)
    shape = accept_shape(num_requests, max_draft_len, vocab_size, label)
    draft_probs_bytes = num_requests * max_draft_len * vocab_size * 4 if mode == native.SAMPLED else 0
    num_issued = 0.0 if vocab_size <= accept.PART_ENTRIES else num_rows * issued_by_parts(mode, vocab_size)
    return KernelCase("accept", shape, check, calls, logits.nbytes + draft_probs_bytes, num_issued=num_issued)


def accept_shape(num_requests: int, max_draft_len: int, vocab_size: int, label: str) -> str:
    """Return the shape's name in reports."""
    return f"{num_requests} requests x {max_draft_len} drafts, vocabulary {vocab_size}, {label}"


def issued_by_parts(mode: int, vocab_size: int) -> float:
    """Return the instructions of a row's warps that read its parts."""
    return PART_INSTRUCTIONS[mode] * accept.NUM_ROW_THREADS / 32 * -(-vocab_size // accept.PART_ENTRIES)
