"""Make sure that an engine directory has a cost table for this machine, after a build and before engines are opened.

If several processes call it at once, one measures and the others wait and read its table.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from faser_trtllm.backends import find_backend
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.errors import ConfigError, EngineFileError, FaserError
from faser_trtllm.fingerprint import PROFILE, extra_table_path, find_costs, gpu_model
from faser_trtllm.json_text import write_json
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.registry import needs_costs

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

DISTURBED_S = 600.0  # a start replaces a disturbed table only when it is older


def ensure_profile(engine_dir: Path, config: ExecutorConfig, replace_disturbed: bool = True) -> None:
    """Measure missing costs; call it before open_executor.

    If the configured speculation needs costs, measure a missing table, or one of this machine next to a table of a
    different machine or number of threads ("auto" needs none if there is no table at all). A quick table that other
    work disturbed is replaced after DISTURBED_S; replace_disturbed is False for a start that clients wait for.

    Failures to measure or write raise nothing; open_executor then runs without a table or refuses.
    """
    speculation = config.speculation
    if not (speculation == "auto" or needs_costs(speculation)):
        return
    if speculation == "auto" and not (engine_dir / PROFILE).exists():
        return
    try:
        missing = _missing_table(engine_dir, config.cores, config.num_threads)
        if missing is not None and missing.is_disturbed and not replace_disturbed:
            return
        if missing is not None and os.access(engine_dir, os.W_OK):
            seconds = measure_once(engine_dir, config.cores, config.num_threads)
            if seconds is not None:
                log.warning("%s; measured for this machine in %.0f s", missing.reason, seconds)
    except EngineFileError:
        return  # opening the engines reports the same
    except (FaserError, OSError) as error:
        log.warning("the costs of %s could not be measured: %s", engine_dir, error)


def can_measure(engines: EngineDir) -> bool:
    """Return True if this machine can profile the engines and something drafts for them."""
    if not engines.build_config.max_draft_len:
        return False
    if find_backend(engines.backend).on_cpu:
        return True
    try:
        gpu_model()
    except ConfigError:
        return False
    return True


def measure_once(
    engine_dir: Path,
    cores: tuple[int, ...] | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> float | None:
    """Run the quick profile and return its seconds; None if a table fits or none can be measured here.

    Raises FaserError if the engines cannot be measured, OSError if the directory cannot be written.
    """
    with _locked(engine_dir):
        missing = _missing_table(engine_dir, cores, num_threads)
        if missing is None:
            return None
        # Both import the whole executor, which is not needed if a table fits.
        from faser_trtllm.profiling.options import ProfileOptions
        from faser_trtllm.profiling.profile import measure_engine_dir

        options = ProfileOptions(engine_dir, quick=True, cores=cores, num_threads=num_threads)
        report = measure_engine_dir(options, progress)
        write_json(report.to_json(), missing.path or extra_table_path(engine_dir, report.table.fingerprint))
        return report.seconds


class _Missing(NamedTuple):
    """A table to measure. path: None: next to that of another machine. is_disturbed: it replaces a disturbed one."""

    reason: str
    path: Path | None
    is_disturbed: bool = False


def _missing_table(engine_dir: Path, cores: tuple[int, ...] | None, num_threads: int | None) -> _Missing | None:
    """Return the table to measure; None if a table fits or none can be measured here."""
    if not can_measure(EngineDir.load(engine_dir)):
        return None
    with CoreSet(cores, num_threads) as core_set:
        num_threads = core_set.num_threads
    try:
        found = find_costs(engine_dir, num_threads)
    except ConfigError as error:
        return _Missing(str(error).rpartition(";")[0], None)
    if found is None:
        return _Missing(f"{engine_dir} has no cost table", engine_dir / PROFILE)
    path, table = found
    if table.warning and table.quick and time.time() - path.stat().st_mtime > DISTURBED_S:
        return _Missing(f"{path} was measured while other work slowed this machine", path, is_disturbed=True)
    return None


@contextlib.contextmanager
def _locked(engine_dir: Path) -> Iterator[None]:
    """Make other processes that would measure this directory wait. Has no effect on file systems without locks."""
    descriptor = os.open(engine_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
