"""Every case of reliability_cases.py is answered, by tests that exist."""

import ast
from functools import cache

import pytest

from tests.serving.reliability.cases import CASES, NUM_CASES
from tests.serving.reliability.faults import FAULTS
from tests.serving.reliability.inputs import INPUTS
from tests.support.triton_server import ROOT


@cache
def collected(path):
    """Names of the tests that pytest finds in a module of the suite."""
    assert path.startswith("tests/"), path
    assert path.rpartition("/")[2].startswith("test_"), path
    body = ast.parse((ROOT / path).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_number_is_answered_once():
    assert not FAULTS.keys() & INPUTS.keys()
    assert sorted(CASES) == list(range(1, NUM_CASES + 1))


@pytest.mark.parametrize("number", sorted(CASES))
def test_a_case_has_tests_that_exist_or_a_reason(number):
    answer = CASES[number]
    assert answer
    if isinstance(answer, str):
        assert "::" not in answer, "one id alone is a tuple too"
        return
    for test_id in answer:
        path, _, name = test_id.partition("::")
        assert name.partition("[")[0] in collected(path), f"{test_id} does not exist"
