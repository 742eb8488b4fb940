"""Settings of every test: a property is judged by what it says, not by how long an example takes on a busy machine, and
by the same examples every time, so that a failure is the change's; FASER_RANDOM=1 draws new ones."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import imitations
from tests.support.effort import EVERYTHING, examples

# Before torch is loaded: tiny tensors in many threads take twenty times as long on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; some tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all tests are collected: what is imported and collected stays, so that looking for garbage among it is in vain.
gc.disable()

settings.register_profile(
    "faser",
    max_examples=examples(100),
    deadline=None,
    derandomize=not os.environ.get("FASER_RANDOM"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("faser")


LEFT_OUT = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    asked_for = [os.path.relpath(argument.partition("::")[0], config.rootpath) for argument in config.args]
    changed = None if EVERYTHING else imitations.changed_files()
    config.stash[LEFT_OUT] = imitations.left_out(changed, asked_for)


def pytest_report_header(config: pytest.Config) -> list[str]:
    folders = " ".join(sorted(config.stash[LEFT_OUT]))
    return [f"left out, since nothing that they cover changed (--all runs them): {folders}"] if folders else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests that imitate devices (support/imitations.py)."""
    if not collection_path.is_relative_to(config.rootpath):
        return None
    return collection_path.relative_to(config.rootpath).as_posix() in config.stash[LEFT_OUT] or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers share the files out, those with slow tests come first: none begins one when the others are done."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Collections leave out what was there before the first test, which takes them a twentieth of a run's work."""
    gc.freeze()
    gc.enable()
