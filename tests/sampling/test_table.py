"""The sampling table: the native structure field for field, and slots filled from requests."""

import ctypes
import gc
import re
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.native.structures import NUM_SOURCES
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, float32_at, int32_at
from faser_trtllm.ops.probs import next_token_probs
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.table import SamplingTable, random_key

HEADER = Path(__file__).parents[2] / "plugins" / "cpu" / "faser_cpu.h"
C_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float}
C_TYPES["faser_fill_masks"] = ctypes.c_void_p


def header_fields(struct):
    """(name, ctypes type) of each field of a structure of the header."""
    body = re.search(r"typedef struct \{([^}]*)\} " + struct, HEADER.read_text()).group(1)
    for line in re.sub(r"//.*", "", body).split(";"):
        declaration = re.match(r"(?:const )?(\w+)(\*?) (.+)", line.strip())
        if declaration:
            kind, pointer, names = declaration.groups()
            for name in names.split(","):
                name, _, length = name.strip().partition("[")
                found = ctypes.c_void_p if pointer else C_TYPES[kind]
                yield name, found * NUM_SOURCES if length == "FASER_NUM_SOURCES]" else found


def test_the_dtype_is_the_header_s_structure():
    fields = list(header_fields("faser_sampling"))
    structure = type("FromHeader", (ctypes.Structure,), {"_fields_": fields})
    assert SAMPLING_DTYPE.itemsize == ctypes.sizeof(structure) == 208
    assert list(SAMPLING_DTYPE.names) == [name for name, _ in fields]
    for name, kind in fields:
        dtype, offset = SAMPLING_DTYPE.fields[name][:2]
        field = getattr(structure, name)
        assert (offset, dtype.itemsize) == (field.offset, field.size), name
        assert dtype.base.kind == {"c_float": "f", "c_int": "i", "c_long_Array_2": "i"}.get(kind.__name__, "u"), name


def test_a_sampling_parameter_is_named_in_few_files():
    """Its row, the records that carry it, what applies it, and the models' configurations; nothing passes it on."""
    root = HEADER.parents[2]
    suffixes = {".py", ".h", ".cpp", ".inl", ".cu", ".cuh", ".pbtxt"}
    files = [
        path for folder in ("faser_trtllm", "plugins", "triton_model_repo") for path in (root / folder).rglob("*.*")
    ]
    named = [path for path in files if path.suffix in suffixes and re.search(r"\bmin_p\b", path.read_text())]
    assert root / "faser_trtllm/core/sampling_params.py" in named
    assert len(named) <= 12, "\n".join(map(str, sorted(named)))


def request(prompt=(1, 2, 3), **params):
    return Request("r", prompt, SamplingParams(**params), max_seq_len=64, max_draft_len=4)


def test_fields_come_from_the_request():
    table = SamplingTable(3, 100, 4)
    bound = request(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        seed=2**64 - 1,
        min_tokens=2,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        bad_words=((4,), (5, 6, 7)),
        logit_bias=((8, 1.5), (9, -2.0)),
        end_ids=(10, 11),
    )
    table.bind(1, bound)
    gc.collect()
    entry = table.array[1]
    assert entry["mode"] == native.SEEDED
    assert entry["key"] == 2**64 - 1
    numbers = ("temperature", "top_k", "top_p", "min_p", "min_tokens", "prompt_len")
    assert [entry[name] for name in numbers] == [0.5, 7, 0.75, 0.25, 2, 3]
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [entry[name] for name in penalties] == [1.5, 0.5, -0.25]
    assert int32_at(int(entry["tokens"]), 3).tolist() == [1, 2, 3]
    assert int32_at(int(entry["cu_bad_words"]), entry["num_bad_words"] + 1).tolist() == [0, 1, 4]
    assert int32_at(int(entry["bad_words"]), 4).tolist() == [4, 5, 6, 7]
    assert int32_at(int(entry["bias_ids"]), entry["num_bias"]).tolist() == [8, 9]
    assert float32_at(int(entry["bias_values"]), entry["num_bias"]).tolist() == [1.5, -2.0]
    assert int32_at(int(entry["end_ids"]), entry["num_end_ids"]).tolist() == [10, 11]
    assert table.array[0] == table.array[2] == np.zeros((), SAMPLING_DTYPE)


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ({}, native.GREEDY),
        ({"temperature": 0.0, "seed": 1}, native.GREEDY),
        ({"top_k": 1, "temperature": 2.0}, native.GREEDY),
        ({"temperature": 1.0, "seed": 0}, native.SEEDED),
        ({"top_p": 0.5}, native.SAMPLED),
    ],
)
def test_modes(params, mode):
    table = SamplingTable(1, 10, 2)
    table.bind(0, request(**params))
    assert table.array[0]["mode"] == mode


def test_defaults_edit_nothing():
    table = SamplingTable(1, 3, 2)
    table.bind(0, request(temperature=1.0))
    probs = np.empty(3, np.float32)
    next_token_probs(table.array, 0, np.log([0.5, 0.25, 0.25]).astype(np.float32), 3, probs)
    np.testing.assert_allclose(probs, [0.5, 0.25, 0.25], rtol=1e-6)


def test_draft_distributions_are_allocated_once_and_only_for_sampled_requests():
    table = SamplingTable(2, 50, 4)
    table.bind(0, request())
    table.bind(1, request(temperature=1.0, seed=5))
    assert table.draft_probs.rows(0).shape == (0, 50)
    assert not table.array["draft_probs"].any()
    table.bind(0, request(temperature=1.0))
    address = int(table.array[0]["draft_probs"])
    assert table.draft_probs.rows(0).shape == (4, 50)
    assert address == table.draft_probs.rows(0).ctypes.data
    table.release(0)
    assert table.array[0]["draft_probs"] == 0
    table.bind(0, request(temperature=1.0))
    assert table.array[0]["draft_probs"] == address


def test_every_bind_draws_a_new_key():
    keys = iter(range(100, 200))
    table = SamplingTable(1, 10, 2, new_key=lambda: next(keys))
    same = request(temperature=1.0)
    table.bind(0, same)
    table.array[0]["draft_counter"] = 7
    assert table.array[0]["key"] == 100
    table.bind(0, same)
    assert (table.array[0]["key"], table.array[0]["draft_counter"]) == (101, 0)
    assert random_key() != random_key()
    assert 0 <= random_key() < 2**64


def test_a_slot_forgets_the_request_before():
    table = SamplingTable(1, 10, 2)
    table.bind(0, request(temperature=1.0, top_k=3, end_ids=(1,), bad_words=((1,),), logit_bias=((1, 1.0),)))
    table.bind(0, request())
    entry = table.array[0]
    names = ("end_ids", "bias_ids", "bias_values", "bad_words", "cu_bad_words", "draft_probs", "key")
    assert not any(entry[name] for name in (*names, "num_end_ids", "num_bias", "num_bad_words", "top_k"))


@pytest.mark.parametrize("draft_probs", [None, HostDraftProbs(2, 0, 10)])
def test_where_nothing_is_drawn_no_distribution_is_kept(draft_probs):
    table = SamplingTable(2, 10, 0 if draft_probs is None else 3, draft_probs=draft_probs)
    one = request(temperature=1.0)
    table.bind(0, one)
    assert (table.array[0]["mode"], table.array[0]["draft_probs"]) == (native.SAMPLED, 0)
    assert table.draft_probs.rows(0).shape == (0, 10)
    table.park(0, one)
    table.release(0)
    table.bind(1, one)
    assert table.is_bound(1)


def test_tests_are_counted_by_slot_whoever_has_it():
    table = SamplingTable(2, 10, 3)
    for passed in (4, 6):
        table.bind(1, request())
        table.array["num_tested"][1, native.BY_SUFFIX] += 10
        table.array["num_passed"][1, native.BY_SUFFIX] += passed
        table.release(1)
    assert table.tests(native.BY_SUFFIX) == (20, 10)
    assert table.tests(native.BY_MODEL) == (0, 0)
    assert not table.is_bound(1)
