"""A process of ThreadSanitizer's: runs the kernels' cases as they are, then with one barrier left out at a time.

    LD_PRELOAD=libtsan.so python -m tests.ops.cuda.barriers.mutants '["early_exit"]' '[["early_exit.cu", 56]]'

A race in the kernels as they are is an error, with a report. Prints what the absence of each barrier did, as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from faser_trtllm.ops.cuda.compiler import source_dir, source_of, with_headers
from tests.ops.cuda.barriers.places import Place
from tests.ops.cuda.emulation import is_sanitized
from tests.ops.cuda.kernel_cases import module_of, results_of

ORDERS = (0, 1, 5)
MAX_CPU_S = 100  # of a kernel that never ends, say for want of a barrier in its loop

NOT_REACHED, NOTHING, OTHER_RESULTS, RACE = "not reached", "nothing", "other results", "race"
_STATUSES = {0: NOTHING, 3: OTHER_RESULTS, 4: NOT_REACHED, 66: RACE}  # 66 is ThreadSanitizer's


def main(stems: Sequence[str], places: Sequence[Place]) -> dict[str, str]:
    """Return for each barrier what its absence causes in the first stem where it causes anything."""
    wanted = {}
    for stem in stems:
        status, wanted[stem] = _in_child(partial(_run_whole, stem))
        assert status == 0, f"{stem} ended with {status}: a race, or results that depend on the threads' order"
    return {str(place): _absence(place, wanted) for place in places}


def _absence(place: Place, wanted: dict[str, list[bytes]]) -> str:
    found = NOT_REACHED
    for stem in wanted:
        if source_dir() / place.file in with_headers(source_of(stem)):
            status, _ = _in_child(partial(_run_without, place, stem, wanted[stem]))
            seen = _STATUSES[status] if status >= 0 else signal.Signals(-status).name
            if seen not in (NOT_REACHED, NOTHING):
                return seen
            found = NOTHING if NOTHING in (found, seen) else NOT_REACHED
    return found


def _in_child(work: Callable[[], tuple[int, list[bytes]]]) -> tuple[int, list[bytes]]:
    """The exit status and the results of a process, which a race ends.

    Only children run kernels: in one that is forked after fibers have run, ThreadSanitizer reports races where there
    are none.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        status, results = work()
        with open(write_end, "wb") as out:
            pickle.dump(results, out)
        os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        written = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, pickle.loads(written) if written else []


def _run_whole(stem: str) -> tuple[int, list[bytes]]:
    wanted = results_of(stem)
    return 0 if all(results_of(stem, order) == wanted for order in ORDERS) else 3, wanted


def _run_without(place: Place, stem: str, wanted: list[bytes]) -> tuple[int, list[bytes]]:
    """The exit status and no results; a race ends the process before."""
    module = module_of(stem)
    module.leave_out(*place)
    try:
        found = [results_of(stem, order) for order in ORDERS]
    except AssertionError:  # of a case's own checks
        return 3, []
    if module.leave_out("", 0) == 0:
        return 4, []
    return 0 if all(results == wanted for results in found) else 3, []


if __name__ == "__main__":
    assert is_sanitized(), "ThreadSanitizer is not loaded"
    print(json.dumps(main(json.loads(sys.argv[1]), [Place(*each) for each in json.loads(sys.argv[2])])))
