"""Mixtures of experts in the cost model: sizes, the anchors where they were measured, and what an expert adds."""

from dataclasses import replace

import pytest

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.experts import ANCHORED, expert_times, load_experts
from lab.costmodel.gpu import GPUS
from lab.costmodel.pair import Pair
from lab.costmodel.passes import PassModel
from lab.costmodel.shape import SHAPES, find_shape
from lab.costmodel.table import ExitSignal, modeled_table

H100, QWEN = GPUS["h100"], SHAPES["qwen3-30b-a3b"]
SMALL = SHAPES["qwen3-0.6b"]


@pytest.mark.parametrize(
    ("name", "resident_gb", "active_gb"),
    [
        ("qwen3-30b-a3b", 61.1, 6.1),
        ("mixtral-8x7b", 93.4, 25.5),
        ("gpt-oss-20b", 13.8, 3.8),
        ("gpt-oss-120b", 65.2, 5.2),
    ],
)
def test_memory_holds_all_experts_and_a_pass_of_one_row_reads_its_own(name, resident_gb, active_gb):
    """30.5, 46.7, 20.9 and 116.8 billion parameters; experts of the last two at 4.25 bits."""
    assert SHAPES[name].resident_gb == pytest.approx(resident_gb, rel=0.02)
    assert SHAPES[name].pass_gb == pytest.approx(active_gb, rel=0.05)


@pytest.mark.parametrize(("gpu", "name"), [(gpu, name) for gpu in load_experts()["gpus"] for name in ANCHORED])
def test_an_anchor_is_reproduced(gpu, name):
    """gpt-oss's two have experts of one size, so that one stands for both."""
    measured = load_experts()["gpus"][gpu].get(name)
    if measured is None:
        return
    times = expert_times(GPUS[gpu], ANCHORED[name])
    routing = ANCHORED[name].experts.routing
    few, every = routing.top_k, routing.num_experts
    for rows, more_ms in [(1, 0.0), *measured["more"]]:
        experts = few if rows == 1 else every
        expected = measured["fixed_ms"] + experts * measured["expert_ms"] + more_ms
        assert times.ms(rows, experts) == pytest.approx(expected, rel=0.06 if name.startswith("gpt") else 0.005)
    assert not times.is_assumed


def test_the_h100_takes_what_the_reference_has_for_all_experts_at_256_rows():
    """In us of a layer: 447, 545 and 701 (aiconfigurator-core 0.12.0)."""
    for name, us in (("qwen3-30b-a3b", 447), ("mixtral-8x7b-fp8", 545), ("gpt-oss-120b", 701)):
        shape = ANCHORED[name]
        assert expert_times(H100, shape).ms(256, shape.experts.routing.num_experts) == pytest.approx(us / 1e3, rel=0.02)


def test_experts_of_another_size_are_between_their_neighbors():
    larger = replace(QWEN, hidden_size=4096, experts=replace(QWEN.experts, intermediate_size=1536))
    ms = [expert_times(H100, shape).expert_ms for shape in (QWEN, larger, SHAPES["mixtral-8x7b"])]
    assert ms[0] < ms[1] < ms[2]
    assert ms[1] == pytest.approx(0.01199, rel=0.06)  # Qwen3-235B's, of the same tables


def test_a_gpu_without_tables_is_scaled_by_its_bandwidth_and_says_so():
    times, reference = expert_times(GPUS["l40s"], SHAPES["gpt-oss-20b"]), expert_times(H100, SHAPES["gpt-oss-20b"])
    assert times.is_assumed
    assert times.expert_ms == pytest.approx(reference.expert_ms * 3.05 / 0.78)


def test_every_distinct_expert_adds_its_time_in_each_layer():
    model = PassModel(H100, QWEN)
    few, many = (model.ms(8, 2, 512, num_experts=count) for count in (20, 50))
    assert many - few == pytest.approx(30 * 48 * 0.00313, rel=0.01)
    assert model.per_expert_ms == pytest.approx(48 * 0.00313, rel=0.01)
    assert PassModel(H100, SMALL).per_expert_ms == 0.0
    assert model.ms(8, 2, 512) == model.ms(8, 2, 512, num_experts=Routing(128, 8).distinct([4, 4]))


def test_rows_that_share_fewer_experts_take_longer():
    apart, alike = (PassModel(H100, QWEN.with_overlap(overlap)).ms(8, 1, 512) for overlap in (0.1, 0.45))
    assert apart > 1.3 * alike
    assert PassModel(H100, QWEN.with_overlap(0.1)).ms(1, 1, 512) == pytest.approx(
        PassModel(H100, QWEN.with_overlap(0.45)).ms(1, 1, 512)
    )


def test_the_table_says_what_the_model_says_with_its_experts():
    table = modeled_table(Pair(H100, QWEN, SMALL), max_batch_size=64, exit_signal=ExitSignal())
    pair = Pair(H100, QWEN, SMALL)
    for n, b in ((1, 1), (4, 1), (4, 4), (16, 4), (32, 32), (64, 16), (256, 64)):
        assert table.verify_ms(n, b, 1024) == pytest.approx(pair.verify_ms(n, b, 1024), rel=0.08)
    assert table.routing == QWEN.experts.routing
    assert table.curves["verify@all"].per_expert_ms == pytest.approx(pair.target.per_expert_ms, rel=0.1)
    ahead, behind = (table.curves[f"segment:{i}@all"].per_expert_ms for i in range(2))
    assert ahead / (ahead + behind) == pytest.approx(0.25, abs=0.05)


def test_the_closed_form_has_public_counts_with_one_overlap():
    """The counts are for drafts of one request: Laguna XS 2.1, 8 of 256 experts, at 8 and 15 rows (lucebox 501)."""
    routing = Routing(256, 8, 0.17)
    assert routing.distinct([8]) == pytest.approx(39.4, rel=0.05)
    assert routing.distinct([15]) == pytest.approx(58.9, rel=0.05)
    assert Routing(64, 4, 0.257).distinct([2]) / 4 == pytest.approx(1.74, rel=0.01)  # GLM-4.7-Flash (mlx-lm 1485)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QWEN.on(4), "qwen3-30b-a3b is a mixture of experts"),
        (lambda: QWEN.with_overlap(1.5), "expert_overlap is 1.5; it must be at least 0 and less than 1"),
        (lambda: SMALL.with_overlap(0.2), "qwen3-0.6b has no experts"),
    ],
)
def test_what_is_not_modeled_is_refused(make, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_checkpoint_gives_the_shape_of_its_config(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,'
        '"vocab_size": 151936, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,'
        '"norm_topk_prob": true, "head_dim": 128, "num_hidden_layers": 48, "num_attention_heads": 32,'
        '"num_key_value_heads": 4, "max_position_embeddings": 40960}'
    )
    assert replace(find_shape(str(tmp_path)), name=QWEN.name) == QWEN
