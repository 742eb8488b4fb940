"""A Chrome/Perfetto trace of the executor's steps: lanes, rows, pruned rows and modes over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from faser_trtllm.core.closing import Closing
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult

_LANES = {"schedule": 0, "draft": 1, "verify": 2, "update": 3}


class TraceWriter(Closing):
    """Writes the JSON array form of the Trace Event Format, event by event; a cut-off file still loads."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w")
        self._file.write("[\n")
        for name, lane in _LANES.items():
            self._write({"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}})

    def step(
        self,
        plan: SchedulerOutput,
        drafts: DraftResult,
        result: VerifyResult,
        times_s: tuple[float, float, float, float],
    ) -> None:
        """times_s: start of the step, then the ends of schedule, of drafting and verification, and of update."""
        start, scheduled, verified, updated = (1e6 * t for t in times_s)
        draft_us, verify_us = 1e3 * drafts.draft_ms, 1e3 * result.verify_ms
        common = {"mode": plan.mode.value, "num_requests": len(plan.scheduled)}
        self._slice("schedule", start, scheduled - start, common)
        if sum(drafts.num_new_drafts):
            found: dict[str, float] = {"num_drafts": sum(drafts.num_new_drafts)}
            if drafts.num_free:
                found |= {"num_without_model": sum(drafts.num_free), "us_without_model": 1e3 * drafts.free_ms}
            self._slice("draft", scheduled, draft_us + 1e3 * drafts.free_ms, common | found)
        rows = {
            "num_rows": sum(s.num_new_tokens for s in plan.scheduled) + sum(result.num_verified),
            "num_pruned_rows": sum(result.num_pruned),
            "num_accepted": sum(result.num_accepted),
            "num_tokens": sum(result.num_tokens),
        }
        self._slice("verify", verified - verify_us, verify_us, common | rows)
        self._slice("update", verified, updated - verified, common)
        self._write({"name": "rows", "ph": "C", "pid": 1, "ts": start, "args": {"rows": rows["num_rows"]}})

    def close(self) -> None:
        self._file.write('{"name": "end", "ph": "M", "pid": 1, "args": {}}\n]\n')
        self._file.close()

    def _slice(self, name: str, start_us: float, length_us: float, args: dict[str, Any]) -> None:
        event = {"name": name, "ph": "X", "pid": 1, "tid": _LANES[name], "ts": start_us, "dur": length_us}
        self._write(event | {"args": args})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")
