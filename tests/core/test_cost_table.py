import json
import tracemalloc

import numpy as np
import pytest

from faser_trtllm.core.cost_curve import interpolate
from faser_trtllm.core.cost_table import (
    CostCurve,
    CostSample,
    CostTable,
    ExitModel,
    Fingerprint,
    Interference,
)
from faser_trtllm.errors import ConfigError

HERE = Fingerprint("Some CPU", "avx2", 2, "abc")
ROWS = (1, 2, 4, 8, 16, 17, 32, 33, 64)


def truth(rows, requests, context):
    return 0.4 + 0.8 * -(-rows // 16) + 0.01 * rows + 0.02 * requests + 1e-5 * rows * context


def samples(noise=0.0):
    rng = np.random.default_rng(0)
    out = []
    for n in ROWS:
        for b in {1, max(1, n // 4), n}:
            for context in (64, 512):
                ms = truth(n, b, context) * (1 + noise * rng.standard_normal())
                out.append(CostSample("verify", n, b, context, ms))
    for b in (1, 2, 4, 8):
        for context in (64, 512):
            out.append(CostSample("draft_step", b, b, context, 0.05 + 0.01 * b + 1e-6 * b * context))
    return out


def test_an_additive_truth_is_recovered_with_its_stairs():
    table = CostTable.fit(samples(), HERE)
    for n, b, context in ((1, 1, 64), (16, 3, 300), (17, 3, 300), (33, 8, 1000)):
        assert table.verify_ms(n, b, context) == pytest.approx(truth(n, b, context), rel=2e-3)
    assert table.verify_ms(17, 1, 64) - table.verify_ms(16, 1, 64) > 0.7  # the edge of a tile
    assert table.draft_step_ms(4, 512) == pytest.approx(0.05 + 0.04 + 4 * 512e-6, rel=2e-3)


def test_held_out_samples_give_the_error_and_are_not_fitted():
    held_out = [CostSample("verify", 12, 3, 200, 2 * truth(12, 3, 200)), CostSample("draft_step", 3, 3, 64, 0.08019)]
    table = CostTable.fit(samples(0.01), HERE, held_out=held_out)
    assert table.held_out_errors["verify"] == pytest.approx(0.5, abs=0.05)
    assert table.held_out_errors["draft_step"] < 0.02
    assert 12 not in table.curves["verify@all"].rows


def test_noise_cannot_make_more_rows_cheaper_or_a_slope_negative():
    table = CostTable.fit(samples(0.2), HERE)
    array = table.verify_ms_array(200, 4, 128)
    assert (np.diff(array) >= 0).all()
    curve = table.curves["verify@all"]
    assert curve.per_request_ms >= 0
    assert curve.per_row_context_ms >= 0


def test_the_array_agrees_with_the_scalar_and_grows():
    table = CostTable.fit(samples(), HERE)
    array = table.verify_ms_array(20, 4, 128)
    assert array[0] == 0
    for n in (1, 5, 16, 17, 20):
        assert array[n] == pytest.approx(table.verify_ms(n, 4, 128))
    assert np.array_equal(table.verify_ms_array(20, 4, 125), array)  # the same bucket of context
    assert table.verify_ms_array(20, 4, 137)[20] == pytest.approx(table.verify_ms(20, 4, 144))
    grown = table.verify_ms_array(300, 4, 128)
    assert grown[300] == pytest.approx(table.verify_ms(300, 4, 128))
    steps = table.draft_step_ms_array(8, 512)
    assert steps[3] == pytest.approx(table.draft_step_ms(3, 512))


def test_batch_sizes_and_contexts_leave_nothing_in_memory():
    table = CostTable.fit(samples(), HERE)
    tracemalloc.start()
    try:
        table.verify_ms_array(2000, 1, 0)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, 500):
            table.verify_ms_array(2000, number % 32 + 1, 16 * number)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 64 << 10, "an array of 2,000 rows takes 16 KB"


def test_the_first_step_of_a_draft_call_also_runs_what_was_committed():
    rows = [CostSample("draft_rows", n, r, 64, 0.05 + 0.01 * n + 0.02 * r) for n in (2, 4, 8, 16) for r in (1, 2)]
    table = CostTable.fit(samples() + rows, HERE)
    first = table.draft_first_ms_array(8, 2.0, 64)
    assert first[0] == 0
    for n in range(1, 9):
        assert first[n] == pytest.approx(table.draft_rows_ms(2 * n, n, 64))
    between = table.draft_first_ms_array(4, 1.5, 64)
    assert between[4] == pytest.approx(table.draft_rows_ms(6, 4, 64))
    without = CostTable.fit(samples(), HERE)
    assert without.draft_first_ms_array(3, 1.5, 64)[3] == pytest.approx(without.draft_step_ms(3, 64))


def test_a_step_without_drafts_has_a_curve_of_its_own():
    decode = [CostSample("decode", n, n, c, 0.1 * n + 1e-4 * n * c) for n in (1, 4, 8) for c in (64, 256)]
    table = CostTable.fit(samples() + decode, HERE)
    assert table.decode_ms(4, 64) == pytest.approx(0.4256, rel=0.01)
    without = CostTable.fit(samples(), HERE)
    assert without.decode_ms(4, 64) == without.verify_ms(4, 4, 64)


def test_segments_add_up_and_what_remains_shrinks():
    parts = [CostSample(f"segment:{i}", n, 1, 64, t * n) for i, t in enumerate((0.1, 0.3)) for n in (1, 8)]
    table = CostTable.fit(samples() + parts, HERE, exits=[ExitModel(1, -1.0, -0.5, 0.5, 0.1, pays=True)])
    assert table.num_segments == 2
    assert table.remaining_ms_array(0, 8, 1, 64)[8] == pytest.approx(3.2)
    assert table.remaining_ms_array(1, 8, 1, 64)[4] == pytest.approx(1.2)
    assert [model.boundary for model in table.exits if model.pays] == [1]


def test_json_keeps_everything(tmp_path):
    table = CostTable.fit(
        samples(),
        HERE,
        held_out=samples()[:3],
        interference=[Interference("draft", "verify", 1.2, 1.1)],
        exits=[ExitModel(1, -1.0, -0.5, 0.5, 0.1)],
        overhead_ms=0.1,
    )
    table.save(tmp_path / "profile.json")
    again = CostTable.load(tmp_path / "profile.json", HERE)
    assert again == table
    assert again.interference_of("draft", "verify").verify_factor == 1.1
    assert again.interference_of("draft", "all") is None


def test_a_table_of_another_machine_or_engine_is_refused_with_what_differs(tmp_path):
    CostTable.fit(samples(), HERE).save(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=r"num_threads is 2 there and 8 here.*faser profile"):
        CostTable.load(tmp_path / "profile.json", Fingerprint("Some CPU", "avx2", 8, "abc"))
    with pytest.raises(ConfigError, match=r"engine is 'abc' there and 'xyz' here"):
        CostTable.load(tmp_path / "profile.json", Fingerprint("Some CPU", "avx2", 2, "xyz"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}'])
def test_garbage_is_refused(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ConfigError, match="faser profile"):
        CostTable.load(tmp_path / "profile.json", HERE)


def test_a_garbled_curve_is_refused(tmp_path):
    data = CostTable.fit(samples(), HERE).to_json()
    del data["curves"]["verify@all"]["ms"]
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="ms"):
        CostTable.load(tmp_path / "profile.json", HERE)


def test_required_samples_and_unknown_partitions_are_named():
    with pytest.raises(ValueError, match="verify"):
        CostTable.fit([CostSample("draft_step", 1, 1, 64, 1.0)], HERE)
    with pytest.raises(ValueError, match="'draft'"):
        CostTable.fit(samples(), HERE).verify_ms(1, 1, 64, "draft")


def test_one_cell_is_flat_and_the_tail_continues_the_slope():
    assert CostCurve((4,), (2.0,)).at(9, 1, 0) == 2.0
    curve = CostCurve((1, 2, 4), (1.0, 2.0, 4.0))
    assert curve.at(10, 1, 0) == pytest.approx(10.0)
    assert curve.over_rows(curve.base_ms(10), 1, 0)[10] == pytest.approx(10.0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["curves"]["verify@all"]["rows"].reverse(),
        lambda data: data["curves"]["verify@all"]["rows"].pop(),
        lambda data: data["curves"]["verify@all"].update(rows=[], ms=[]),
        lambda data: data["curves"]["verify@all"].update(per_request_ms=float("nan")),
        lambda data: data["curves"]["verify@all"].update(per_request_ms=10**400),
        lambda data: data["curves"]["verify@all"].update(sizes=[8, 8]),
        lambda data: data.update(curves=5),
        lambda data: data.update(overhead_ms=[]),
        lambda data: data.update(overhead_ms=-5.0),
        lambda data: data["curves"].update({"verify@draft": data["curves"].pop("verify@all")}),
        lambda data: data["curves"].update({"segment:1@all": data["curves"]["verify@all"]}),
        lambda data: data.update(interference=[{}]),
        lambda data: data.update(interference=[vars(Interference("draft", "verify", 1.2, 0.0))]),
        lambda data: data.update(exits=[{"boundary": "first"}]),
        lambda data: data.update(errors={"verify@all": {"in_sample": "none"}}),
        lambda data: data.update(fingerprint=[]),
        lambda data: data.update(format={"format": 1}),
        lambda data: (data.pop("errors"), data.update(samples=[vars(samples()[0])] * 513)),
        lambda data: (data.pop("errors"), data.update(samples=[vars(samples()[0]) | {"num_requests": 10**400}])),
        lambda data: (data.pop("errors"), data.update(samples=[vars(samples()[0]) | {"ms": float("inf")}])),
        lambda data: data.update(warning=json.loads("[" * 400 + "]" * 400)),
    ],
)
def test_a_damaged_table_gets_a_sentence(tmp_path, damage):
    data = CostTable.fit(samples(), HERE).to_json()
    data = json.loads(json.dumps(data))
    damage(data)
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"the cost table .*run `faser profile`") as caught:
        CostTable.load(tmp_path / "profile.json", HERE)
    assert "\n" not in str(caught.value)


def test_a_curve_that_nothing_stands_for_may_be_left_out(tmp_path):
    data = CostTable.fit(samples(), HERE).to_json()
    data["errors"] = {"verify@all": {"in_sample": 0.5, "left_out": True}}
    (tmp_path / "profile.json").write_text(json.dumps(data))
    (warning,) = CostTable.load(tmp_path / "profile.json", HERE).warnings
    assert "verify@all is off by 50 % and is replaced by others" in warning


def test_interpolating_one_number_is_numpys():
    rng = np.random.default_rng(7)
    for _ in range(200):
        xs = np.unique(rng.integers(0, 40, rng.integers(1, 9)))
        ys = rng.normal(size=xs.size)
        for x in (*rng.uniform(-5, 45, 5), *xs):
            assert interpolate(float(x), xs.tolist(), ys.tolist()) == np.interp(x, xs, ys)
