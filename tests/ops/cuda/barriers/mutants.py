"""A process of ThreadSanitizer's: runs the kernels' cases as they are, then with one barrier left out at a time.

    LD_PRELOAD=libtsan.so python -m tests.ops.cuda.barriers.mutants '["early_exit"]' '[["early_exit.cu", 56]]'

A race in the kernels as they are ends it with a report. Prints what the absence of each barrier did, as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.ops.cuda.barriers.places import Place
from tests.ops.cuda.emulation import is_sanitized
from tests.ops.cuda.kernel_cases import module_of, results_of

ORDERS = (0, 1, 5)
MAX_CPU_S = 100  # of a kernel that never ends, say for want of a barrier in its loop

NOT_REACHED, NOTHING, OTHER_RESULTS, RACE = "not reached", "nothing", "other results", "race"
_STATUSES = {0: NOTHING, 3: OTHER_RESULTS, 4: NOT_REACHED, 66: RACE}  # 66 is ThreadSanitizer's


def main(stems: Sequence[str], places: Sequence[Place]) -> dict[str, str]:
    """By barrier: what the first stem shows of its absence that shows anything."""
    wanted = {stem: results_of(stem) for stem in stems}
    for stem in stems:
        assert all(results_of(stem, order) == wanted[stem] for order in ORDERS), f"{stem} depends on the threads' order"
    return {str(place): _absence(place, wanted) for place in places}


def _absence(place: Place, wanted: dict[str, list[bytes]]) -> str:
    found = NOT_REACHED
    for stem in wanted:
        if place.file.endswith(".cuh") or Path(place.file).name == f"{stem}.cu":
            seen = _absence_in(place, stem, wanted[stem])
            if seen not in (NOT_REACHED, NOTHING):
                return seen
            found = NOTHING if NOTHING in (found, seen) else NOT_REACHED
    return found


def _absence_in(place: Place, stem: str, wanted: list[bytes]) -> str:
    """In a process of its own, which it may end."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        os._exit(_run_without(place, stem, wanted))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return _STATUSES[status] if status >= 0 else signal.Signals(-status).name


def _run_without(place: Place, stem: str, wanted: list[bytes]) -> int:
    """The exit status; a race ends the process before."""
    module = module_of(stem)
    module.leave_out(*place)
    try:
        found = [results_of(stem, order) for order in ORDERS]
    except AssertionError:  # of a case's own checks
        return 3
    if module.leave_out("", 0) == 0:
        return 4
    return 0 if all(results == wanted for results in found) else 3


if __name__ == "__main__":
    assert is_sanitized(), "ThreadSanitizer is not loaded"
    print(json.dumps(main(json.loads(sys.argv[1]), [Place(*each) for each in json.loads(sys.argv[2])])))
