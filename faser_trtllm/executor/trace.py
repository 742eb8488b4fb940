"""A Chrome/Perfetto trace of the executor's steps: parts, rows, pruned rows and modes over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from faser_trtllm.core.closing import Closing
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.executor.stats import StepWatcher

_TRACKS = {"schedule": 0, "draft": 1, "verify": 2, "update": 3}


class TraceWriter(Closing, StepWatcher):
    """Writes the JSON array form of the Trace Event Format, event by event; a cut-off file still loads."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w")
        self._file.write("[\n")
        for name, track in _TRACKS.items():
            self._write({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}})

    def step(self, record: StepRecord) -> None:
        plan, drafts, result = record.plan, record.drafts, record.result
        times_s = record.begun_s, record.scheduled_s, record.verified_s, record.updated_s
        start, scheduled, verified, updated = (1e6 * t for t in times_s)
        draft_us, verify_us = 1e3 * drafts.draft_ms, 1e3 * result.verify_ms
        common = {"mode": plan.mode.value, "num_requests": len(plan.scheduled)}
        self._slice("schedule", start, scheduled - start, common)
        if record.num_drafted:
            found: dict[str, float] = {"num_drafts": record.num_drafted}
            if drafts.num_free is not None:
                found |= {"num_without_model": int(drafts.num_free.sum()), "us_without_model": 1e3 * drafts.free_ms}
            self._slice("draft", scheduled, draft_us + 1e3 * drafts.free_ms, common | found)
        rows = {
            "num_rows": record.num_rows - result.num_branches,
            "num_pruned_rows": record.num_pruned,
            "num_accepted": record.num_accepted,
            "num_tokens": record.num_tokens,
        }
        self._slice("verify", verified - verify_us, verify_us, common | rows)
        self._slice("update", verified, updated - verified, common)
        self._write({"name": "rows", "ph": "C", "pid": 1, "ts": start, "args": {"rows": rows["num_rows"]}})

    def close(self) -> None:
        self._file.write('{"name": "end", "ph": "M", "pid": 1, "args": {}}\n]\n')
        self._file.close()

    def _slice(self, name: str, start_us: float, length_us: float, args: dict[str, Any]) -> None:
        event = {"name": name, "ph": "X", "pid": 1, "tid": _TRACKS[name], "ts": start_us, "dur": length_us}
        self._write(event | {"args": args})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")
