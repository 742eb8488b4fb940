"""Fault injection: FASER_FAULT=kind@stepN[+][:time],... breaks a service's engines at their N-th call.

`draft_error@step5` breaks the draft's fifth call, and `draft_error@step5+` that call and all later ones. Calls count
from 1 per engine and engine process. Engines are wrapped when opened, so there is no cost without the variable.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.base import DraftBatch, Engine
from faser_trtllm.errors import ConfigError, OutOfMemoryError
from lab.delegating_engine import DelegatingEngine

log = logging.getLogger(__name__)

VARIABLE = "FASER_FAULT"
DRAFT_KINDS = ("draft_error", "draft_oom", "draft_nan", "draft_slow")
TARGET_KINDS = ("target_nan", "engine_hang", "engine_crash")
TIMED_KINDS = ("draft_slow", "engine_hang")
_SPEC = re.compile(r"([a-z_]+)@step([1-9][0-9]{0,8})(\+?)(?::([0-9]{1,6})(ms|s))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at the step-th call of its engine (the draft's draft(), the target's pass), or from that call on."""

    kind: str
    step: int
    goes_on: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}@step{self.step}{'+' if self.goes_on else ''}"

    def hits(self, call: int) -> bool:
        return call >= self.step if self.goes_on else call == self.step


def parse_faults(spec: str) -> tuple[Fault, ...]:
    """Parse a FASER_FAULT value; raises ConfigError."""
    return tuple(_parse(item.strip()) for item in spec.split(",")) if spec.strip() else ()


def with_faults(engine: Engine, role: str, faults: tuple[Fault, ...]) -> Engine:
    """Return the engine of a role ("target" or "draft"), wrapped if a fault concerns it."""
    kinds = DRAFT_KINDS if role == "draft" else TARGET_KINDS
    own = tuple(fault for fault in faults if fault.kind in kinds)
    if not own:
        return engine
    log.warning("%s is set: the %s engine will break on purpose (%s)", VARIABLE, role, ", ".join(map(str, own)))
    return FaultyEngine(engine, own)


class FaultyEngine(DelegatingEngine):
    """Counts the calls of `inner` and breaks those selected by a fault."""

    def __init__(self, inner: Engine, faults: tuple[Fault, ...]) -> None:
        super().__init__(inner)
        self._faults = faults
        self._num_passes = 0
        self._num_drafts = 0

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        if segment == 0:
            self._begin_pass()
        logits = self._inner.run_segment(batch, segment)
        return None if logits is None else self._spoiled(logits)

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        self._begin_pass()
        logits: npt.NDArray[np.float32] = self._spoiled(self._inner.forward(batch))
        return logits

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        self._num_drafts += 1
        found = self._inner.draft(draft_batch)
        for fault in self._faults:
            if not fault.hits(self._num_drafts):
                continue
            if fault.kind == "draft_error":  # after the call, which has written memory that must not be used
                raise RuntimeError(f"the draft engine failed on purpose ({VARIABLE})")
            if fault.kind == "draft_oom":
                raise OutOfMemoryError(f"the draft engine ran out of memory on purpose ({VARIABLE})")
            if fault.kind == "draft_nan":  # sampling NaN logits gives no draft
                found = np.zeros_like(found)
            elif fault.kind == "draft_slow":
                time.sleep(fault.seconds)
        return found

    def _begin_pass(self) -> None:
        self._num_passes += 1
        for fault in self._faults:
            if fault.kind == "engine_crash" and fault.hits(self._num_passes):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "engine_hang" and fault.hits(self._num_passes):
                time.sleep(fault.seconds)

    def _spoiled(self, logits: Any) -> Any:
        """Put NaN in the first row (the first request's) of the engine's buffer if a fault selects the call."""
        is_hit = any(fault.kind == "target_nan" and fault.hits(self._num_passes) for fault in self._faults)
        if is_hit and logits.shape[0]:
            getattr(logits, "tensor", logits)[0] = np.nan  # device logits wrap a tensor
        return logits


def _parse(item: str) -> Fault:
    match = _SPEC.fullmatch(item)
    kinds = (*DRAFT_KINDS, *TARGET_KINDS)
    kind = item.partition("@")[0]
    if kind not in kinds:
        raise ConfigError(f"{VARIABLE} has the kind {kind[:64]!r}, known are {', '.join(kinds)}")
    if match is None or (match[4] is not None) != (kind in TIMED_KINDS):
        example = f"{kind}@step5:200ms" if kind in TIMED_KINDS else f"{kind}@step5"
        raise ConfigError(f"{VARIABLE} has {item[:64]!r}, which is not of the form {example} (or step5+, from then on)")
    seconds = int(match[4] or 0) * (1e-3 if match[5] == "ms" else 1.0)
    return Fault(kind, int(match[2]), match[3] == "+", seconds)
