"""Golden vectors of the scheduling rules: on our scheduler, on TensorRT-LLM's rules as the stand-ins model them, and on
TensorRT-LLM where it is installed. Where ours differs, the difference is listed with its reason."""

import importlib.util
import re
from pathlib import Path

import pytest

from faser_trtllm.trtllm.gate import load_bindings
from lab.trtllm_check.vectors import load_vectors, run_on_tensorrt_llm
from tests.trtllm import fakes
from tests.trtllm.native_vectors import run_natively

DOCUMENT = Path(__file__).parents[2] / "lab" / "trtllm_check" / "README.md"
VECTORS = load_vectors()
DIFFERENCES = re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=[vector.id for vector in VECTORS])
has_tensorrt_llm = importlib.util.find_spec("tensorrt_llm") is not None


@each_vector
def test_the_rules_as_recorded(vector, monkeypatch):
    fakes.install(monkeypatch)
    assert run_on_tensorrt_llm(vector, load_bindings()).seen_as(vector.expect) == vector.expect


@pytest.mark.trtllm
@pytest.mark.skipif(not has_tensorrt_llm, reason="TensorRT-LLM is not installed: pip install -e '.[trtllm]'")
@each_vector
def test_tensorrt_llm_itself(vector):
    assert run_on_tensorrt_llm(vector, load_bindings()).seen_as(vector.expect) == vector.expect


@each_vector
def test_our_scheduler_does_the_same_unless_the_difference_is_listed(vector):
    """A vector without a difference must agree; one with a difference must not."""
    expected = vector.native if vector.difference else vector.expect
    assert run_natively(vector).seen_as(expected) == expected
    assert (vector.difference is None) == (vector.native is None)
    assert vector.native != vector.expect, "the difference is none any more: take it off the list"


def test_every_difference_is_listed_once_and_has_a_vector():
    assert len(set(DIFFERENCES)) == len(DIFFERENCES)
    assert set(DIFFERENCES) == {vector.difference for vector in VECTORS if vector.difference}


def test_every_rule_has_vectors():
    assert len({vector.id for vector in VECTORS}) == len(VECTORS)
    rules = {vector.id.split("-")[0] for vector in VECTORS}
    assert rules == {"tokens", "chunks", "no", "max", "static", "rewind"}
    for policy in ("EQUAL_PROGRESS", "FIRST_COME_FIRST_SERVED", None):
        assert sum(vector.limits.chunking == policy for vector in VECTORS) >= 2
    for policy in ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"):
        assert sum(vector.limits.capacity == policy for vector in VECTORS) >= 2
