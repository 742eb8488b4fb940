"""Faults on purpose: FASER_FAULT=kind@stepN[+][:time],... breaks the engines of a service at their N-th call.

`draft_error@step5` breaks the draft's fifth call, `draft_error@step5+` that and all later ones; calls are counted from
1 in each engine process, per engine. Engines are wrapped where they are opened, so a service without the variable has
nothing in its way.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.engine.base import Engine, EngineSpec
from faser_trtllm.errors import ConfigError, OutOfMemoryError

log = logging.getLogger(__name__)

VARIABLE = "FASER_FAULT"
DRAFT_KINDS = ("draft_error", "draft_oom", "draft_nan", "draft_slow")
TARGET_KINDS = ("target_nan", "engine_hang", "engine_crash")
TIMED_KINDS = ("draft_slow", "engine_hang")
_SPEC = re.compile(r"([a-z_]+)@step([1-9][0-9]{0,8})(\+?)(?::([0-9]{1,6})(ms|s))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at the step-th call of its engine (the draft's draft(), the target's pass), or from there on."""

    kind: str
    step: int
    goes_on: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}@step{self.step}{'+' if self.goes_on else ''}"

    def hits(self, call: int) -> bool:
        return call >= self.step if self.goes_on else call == self.step


def parse_faults(spec: str) -> tuple[Fault, ...]:
    """Faults of a FASER_FAULT; raises ConfigError."""
    return tuple(_parse(item.strip()) for item in spec.split(",")) if spec.strip() else ()


def faults_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[Fault, ...]:
    """The faults that FASER_FAULT asks for, usually none; raises ConfigError."""
    return parse_faults(environment.get(VARIABLE, ""))


def with_faults(engine: Engine, role: str, faults: tuple[Fault, ...]) -> Engine:
    """The engine ("target" or "draft"), wrapped if a fault is its own."""
    kinds = DRAFT_KINDS if role == "draft" else TARGET_KINDS
    own = tuple(fault for fault in faults if fault.kind in kinds)
    if not own:
        return engine
    log.warning("%s is set: the %s engine will break on purpose (%s)", VARIABLE, role, ", ".join(map(str, own)))
    return FaultyEngine(engine, own)


class FaultyEngine:
    """The Engine protocol around `inner`, which it owns no part of: whoever opened that closes it."""

    def __init__(self, inner: Engine, faults: tuple[Fault, ...]) -> None:
        self._inner = inner
        self._faults = faults
        self._num_passes = 0
        self._num_drafts = 0

    @property
    def spec(self) -> EngineSpec:
        return self._inner.spec

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        if segment == 0:
            self._begin_pass()
        logits = self._inner.run_segment(batch, segment)
        return None if logits is None else self._spoiled(logits)

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        self._begin_pass()
        logits: npt.NDArray[np.float32] = self._spoiled(self._inner.forward(batch))
        return logits

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        self._inner.compact_rows(rows)

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return self._inner.early_exit(rows, candidates)

    def draft(
        self,
        batch: RaggedBatch,
        sampling: npt.NDArray[np.void],
        num_tokens: npt.NDArray[np.int32],
        num_drafts: npt.NDArray[np.int32],
        num_new_drafts: npt.NDArray[np.int32],
        max_draft_len: int,
        stop: DraftStop | None = None,
    ) -> npt.NDArray[np.int32]:
        self._num_drafts += 1
        found = self._inner.draft(batch, sampling, num_tokens, num_drafts, num_new_drafts, max_draft_len, stop)
        for fault in self._faults:
            if not fault.hits(self._num_drafts):
                continue
            if fault.kind == "draft_error":  # after the call, so that what it wrote is there and must not be used
                raise RuntimeError(f"the draft engine failed on purpose ({VARIABLE})")
            if fault.kind == "draft_oom":
                raise OutOfMemoryError(f"the draft engine ran out of memory on purpose ({VARIABLE})")
            if fault.kind == "draft_nan":  # what sampling does with NaN logits: no draft
                found = np.zeros_like(found)
            elif fault.kind == "draft_slow":
                time.sleep(fault.seconds)
        return found

    def close(self) -> None:
        """The inner engine is its owner's to close."""

    def __enter__(self) -> FaultyEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin_pass(self) -> None:
        self._num_passes += 1
        for fault in self._faults:
            if fault.kind == "engine_crash" and fault.hits(self._num_passes):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "engine_hang" and fault.hits(self._num_passes):
                time.sleep(fault.seconds)

    def _spoiled(self, logits: Any) -> Any:
        """With NaN in the first row, the first request's, if a fault says so; the array is the engine's own buffer."""
        is_hit = any(fault.kind == "target_nan" and fault.hits(self._num_passes) for fault in self._faults)
        if is_hit and logits.shape[0]:
            getattr(logits, "tensor", logits)[0] = np.nan  # a device's logits hold their tensor
        return logits


def _parse(item: str) -> Fault:
    match = _SPEC.fullmatch(item)
    kinds = (*DRAFT_KINDS, *TARGET_KINDS)
    kind = item.partition("@")[0]
    if kind not in kinds:
        raise ConfigError(f"{VARIABLE} has the kind {kind[:64]!r}, known are {', '.join(kinds)}")
    if match is None or (match[4] is not None) != (kind in TIMED_KINDS):
        example = f"{kind}@step5:200ms" if kind in TIMED_KINDS else f"{kind}@step5"
        raise ConfigError(f"{VARIABLE} has {item[:64]!r}, which is not of the form {example} (or step5+: from then on)")
    seconds = int(match[4] or 0) * (1e-3 if match[5] == "ms" else 1.0)
    return Fault(kind, int(match[2]), match[3] == "+", seconds)
