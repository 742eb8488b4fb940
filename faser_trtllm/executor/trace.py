"""A Chrome/Perfetto trace of the executor's steps: their parts, rows, pruned rows and modes over time."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any, TextIO

from faser_trtllm.core.closing import Closing
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.errors import ConfigError, reason_of
from faser_trtllm.executor.stats import StepWatcher

log = logging.getLogger(__name__)

_TRACKS = {"schedule": 0, "draft": 1, "verify": 2, "update": 3}


def check_trace_file(path: Path, name: str = "trace_file") -> None:
    """Create the trace file if it is missing; raise ConfigError, naming the setting, if it cannot be written."""
    try:
        path.open("ab").close()
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise ConfigError(
            f"{name} is {path}, which cannot be written: {reason_of(error)}; name a file in an existing, writable "
            "folder"
        ) from error


class TraceWriter(Closing, StepWatcher):
    """Writes the JSON array form of the Trace Event Format, step by step; a cut-off file still loads.

    An existing trace is kept as NAME.1, replacing an older one: after a crash, it is the trace of the crash. If a write
    fails, for example on a full disk, the trace ends with a line in the log, and the steps go on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            if path.is_file() and path.stat().st_size:
                path.replace(path.with_name(f"{path.name}.1"))
            self._file = path.open("w")
        except OSError as error:
            self._give_up(error)
        self._write("[\n" + "".join(map(_line, map(_name, _TRACKS))))

    def step(self, record: StepRecord) -> None:
        if self._file is None:
            return
        plan, drafts, result = record.plan, record.drafts, record.result
        times_s = record.begun_s, record.scheduled_s, record.verified_s, record.updated_s
        start, scheduled, verified, updated = (1e6 * t for t in times_s)
        draft_us, verify_us = 1e3 * drafts.draft_ms, 1e3 * result.verify_ms
        common = {"mode": plan.mode.value, "num_requests": len(plan.scheduled)}
        events = [_slice("schedule", start, scheduled - start, common)]
        if record.num_drafted:
            found: dict[str, float] = {"num_drafts": record.num_drafted}
            if drafts.num_free is not None:
                found |= {"num_without_model": int(drafts.num_free.sum()), "us_without_model": 1e3 * drafts.free_ms}
            events.append(_slice("draft", scheduled, draft_us + 1e3 * drafts.free_ms, common | found))
        rows = {
            "num_rows": record.num_rows - result.num_branches,
            "num_pruned_rows": record.num_pruned,
            "num_accepted": record.num_accepted,
            "num_tokens": record.num_tokens,
        }
        events.append(_slice("verify", verified - verify_us, verify_us, common | rows))
        events.append(_slice("update", verified, updated - verified, common))
        events.append({"name": "rows", "ph": "C", "pid": 1, "ts": start, "args": {"rows": rows["num_rows"]}})
        self._write("".join(map(_line, events)))

    def close(self) -> None:
        self._write('{"name": "end", "ph": "M", "pid": 1, "args": {}}\n]\n')
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, text: str) -> None:
        """Write at once, since buffered text is lost if the process is killed."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the trace %s ends here, it cannot be written: %s", self._path, reason_of(error))
        if self._file is not None:
            with contextlib.suppress(OSError):  # from text that could not be written
                self._file.close()
            self._file = None


def _name(track: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 1, "tid": _TRACKS[track], "args": {"name": track}}


def _slice(name: str, start_us: float, length_us: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 1, "tid": _TRACKS[name], "ts": start_us, "dur": length_us, "args": args}


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event) + ",\n"
