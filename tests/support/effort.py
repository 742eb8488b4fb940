"""How much of what is repeated a run of the tests repeats: a share by default, all of it with FASER_TEST_ALL=1.

`./build.sh test --all` sets it, as CI does. What is left out by default are further examples of a property, further
architectures and instruction sets, longer loops, and whole runs of the project's own benches and soaks.
"""

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

EVERYTHING = os.environ.get("FASER_TEST_ALL") == "1"

ONLY_ALL = pytest.mark.skipif(not EVERYTHING, reason="takes long: ./build.sh test --all runs it")
SHARE = 8  # one in so many of a property's examples
MIN_EXAMPLES = 10


def examples(number: int) -> int:
    """max_examples of a property that has this many when everything runs."""
    return number if EVERYTHING else min(number, max(MIN_EXAMPLES, number // SHARE))


def pick(some: T, everything: T) -> T:
    """Return `some` by default, and `everything` when everything runs."""
    return everything if EVERYTHING else some
