"""Tests of modeled pass times: the anchors where they were measured, sensible values between and beyond them."""

from statistics import fmean

import pytest

from benchmarks.model.own_points import DRAFT
from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.anchors import ANCHORED, Anchors, load_anchors
from lab.costmodel.gpu import GPUS, find_gpu
from lab.costmodel.passes import PassModel
from lab.costmodel.shape import SHAPES, find_shape

H100, B8 = GPUS["h100"], SHAPES["llama-3.1-8b"]


@pytest.mark.parametrize("gpu", GPUS)
def test_an_anchor_is_reproduced(gpu):
    """But for noise, which has more rows take less."""
    data, errors = load_anchors(), []
    for name, values in data["gpus"][gpu].items():
        times = Anchors(GPUS[gpu]).times(ANCHORED[name])
        for index in (0, 8, 17, 26):
            rows = data["rows"][index]
            measured = values["gemm"][index] + values["lm"][index] + values["elem"][index] + values["ar"][index]
            found = sum(times.by_rows(ms, rows) for ms in (times.gemm, times.head, times.elementwise, times.all_reduce))
            errors.append(found / measured - 1.0)
        assert times.attention_ms(64, 1023) == pytest.approx(values["attention"][6][3], rel=0.05), name
    assert max(map(abs, errors)) < 0.15
    assert fmean(map(abs, errors)) < 0.02


def test_more_rows_and_more_context_never_take_less():
    model = PassModel(H100, B8)
    by_rows = [model.ms(n, 8, 1024) for n in (8, 9, 31, 64, 65, 256, 257, 300, 1000, 4096, 6000)]
    assert by_rows == sorted(by_rows)
    by_context = [model.ms(64, 64, c) for c in (100, 1000, 2000, 16000, 32000)]
    assert by_context == sorted(by_context)
    assert by_context[-1] - by_context[-2] == pytest.approx(model.ms(64, 64, 48000) - by_context[-1], rel=0.1)


def test_passes_are_padded_to_the_engines_buckets():
    padded, as_it_is = PassModel(H100, B8), PassModel(H100, B8, is_ours=False)
    assert padded.ms(65, 8, 1) == pytest.approx(padded.ms(96, 8, 1), rel=1e-4)
    assert as_it_is.ms(65, 8, 1) < 0.995 * as_it_is.ms(96, 8, 1)


def test_our_attention_has_a_least_time_that_many_requests_do_not_notice():
    """A chunk of 512 positions is one block's: 28.5 us per layer, whatever else there is."""
    ours, others = PassModel(H100, B8), PassModel(H100, B8, is_ours=False)
    for context in (512, 8192):
        assert ours.attention_ms(1, context) == pytest.approx(32 * 0.02848)
    assert ours.attention_ms(1, 100) < ours.attention_ms(1, 500)
    assert others.attention_ms(1, 512) < 0.6 * ours.attention_ms(1, 512)
    assert others.attention_ms(64, 1024) == ours.attention_ms(64, 1024)


def test_a_few_sms_less_cost_a_pass_of_one_wave_a_second_wave():
    """And a prompt, whose products have many waves, in proportion."""
    model = PassModel(H100, B8)
    assert 1.3 < model.product_ratio(640, 116 / 132) < 1.6
    assert model.product_ratio(8192, 116 / 132) == pytest.approx(132 / 116, rel=0.03)
    assert model.product_ratio(640, 1.0) == 1.0


def test_a_small_model_waits_for_each_product_and_not_for_bandwidth():
    """A quarter of the SMs draws less than half of the bandwidth; 0.3B of one took 1.4 times as long on an H100."""
    assert PassModel(H100, B8).product_ratio(1, 0.25) > 2.0
    assert 1.2 < PassModel(H100, DRAFT).product_ratio(4, 32 / 132) < 1.5


def test_fewer_sms_cost_a_prompt_more_than_a_decode_step():
    """Half of the SMs draw nearly all of the bandwidth, and compute half as fast."""
    model = PassModel(H100, B8)
    decode = model.ms(8, 8, 1024, sm_share=0.5) / model.ms(8, 8, 1024)
    prompt = model.ms(2048, 2, 1024, sm_share=0.5) / model.ms(2048, 2, 1024)
    assert 1.0 < decode < 1.3
    assert 1.7 < prompt < 2.0


def test_segments_make_up_a_pass_and_a_graph_launch_each():
    model = PassModel(H100, B8)
    parts = model.ms(64, 16, 1024, layer_share=0.25, has_head=False) + model.ms(64, 16, 1024, layer_share=0.75)
    assert parts == pytest.approx(model.ms(64, 16, 1024) + 0.012, rel=1e-6)


def test_four_gpus_take_less_than_one_and_more_than_a_quarter():
    one, four = PassModel(H100, B8).ms(16, 16, 1024), PassModel(H100, B8.on(4)).ms(16, 16, 1024)
    assert one / 4 < four < one / 2


def test_fp8_halves_neither_less_nor_more_than_the_matrices():
    shape = SHAPES["qwen3-32b"]
    ratio = PassModel(H100, shape.in_fp8()).ms(8, 8, 1024) / PassModel(H100, shape).ms(8, 8, 1024)
    assert 0.5 < ratio < 0.8


def test_a_prompt_takes_what_the_operator_tables_say():
    measured = load_anchors()["gpus"]["h100"]["llama-3.1-8b"]["prefill"]
    for length, ms in measured.items():
        if int(length) >= 512:
            assert PassModel(H100, B8).prompt_ms(int(length)) == pytest.approx(ms, rel=0.06)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: find_gpu("h20"), "gpu is 'h20'"),
        (lambda: find_shape("gpt-5"), "model is 'gpt-5'"),
        (lambda: B8.on(3), "num_gpus is 3"),
        (lambda: PassModel(GPUS["a100"], B8.in_fp8()), "a100, which has no fp8"),
    ],
)
def test_what_is_not_modeled_is_refused(make, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_checkpoint_gives_the_shape_of_its_config(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,'
        '"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}'
    )
    shape = find_shape(str(tmp_path))
    assert PassModel(H100, shape).ms(8, 8, 1024) == PassModel(H100, B8).ms(8, 8, 1024)
    assert shape.resident_gb == pytest.approx(16.06, rel=0.01)
