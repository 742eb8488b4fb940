"""A client's stream goes on next to the worst requests of another one: compared with the same run without them.

A short form, with a bound that other tests on the same machine do not break; `faser bench bystander` runs the whole
family by the rule itself.
"""

from __future__ import annotations

import functools

import pytest

from benchmarks.bystander.attack import Attacker
from benchmarks.bystander.canary import Canary
from benchmarks.bystander.cases import Case, all_cases
from benchmarks.bystander.runner import describe, run_cases
from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.support.effort import EVERYTHING
from tests.support.triton_server import ROOT, Server

pytestmark = [pytest.mark.triton, pytest.mark.slow]

KINDS = (
    "bad_words at a limit",
    "stop_words at a limit",
    "num_top_log_probs at a limit",
    "return_generation_logits at a limit",
    "bad_words beyond a limit",
    "input_ids beyond a limit",
    "text_input of 4 MB",
    "bad_words of 4 MB",
    "64 prompts of 60 KB",
)


REGEX, PAIRS = "a regular expression with many states", ("a short pair", "a second one")

family = functools.cache(all_cases)  # megabytes, which only the worker with these tests makes


def case_of(kind: str) -> Case:
    """Return the case of a name or the first whose name begins so; PAIRS run for a moment only and compile nothing."""
    if kind == REGEX:
        return next(case for case in family() if "(a|b)*a" in str(case.fields.get("guided_decoding_guide")))
    if kind in PAIRS:
        short = [case for case in family() if not case.is_endless and "guided_decoding_guide" not in case.fields]
        return [case for case in short if case.name.startswith("pairs")][PAIRS.index(kind)]
    return next(case for case in family() if case.name.startswith(kind))


def every_fourth() -> list[str]:
    """Return names of cases, without those of the kinds."""
    known = {case_of(kind).name for kind in (*KINDS, REGEX, *PAIRS)}
    return [case.name for case in family()[::4] if case.name not in known]


MAX_STALL_MS = 3000.0
"""Longer than without the attack; what was mended stalled everybody for 4 to 60 s."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo pair, with room for the canary next to two times 64 sequences."""
    directory = tmp_path_factory.mktemp("demo")
    pair = ROOT / "engines" / "demo"
    sizes = {"max_batch_size": 160, "max_seq_len": 1024}
    build_engines(BuildOptions(pair / "target", pair / "draft", directory / "engine", **sizes))
    with Server(directory / "engine", speculation="fixed:4", log=directory / "log") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def clients(server):
    with Attacker(*server.ports[:2]) as attacker, Canary(server.grpc_url) as canary:
        yield attacker, canary


@pytest.mark.parametrize("kind", [*KINDS, REGEX, *PAIRS, *(every_fourth() if EVERYTHING else [])])
def test_another_client_s_stream_goes_on(server, clients, kind):
    attacker, canary = clients
    (outcome,) = run_cases([case_of(kind)], attacker, canary, seconds=0.6, engine_pid=server.engine_pid)
    assert not outcome.trouble, describe(outcome)
    for found, alone in outcome.delays.values():
        assert found.is_within(alone) or found.max < 2 * alone.max + MAX_STALL_MS, describe(outcome)
    assert "Traceback" not in server.output()
