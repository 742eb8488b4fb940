"""The early_exit kernels, run on the CPU as they are, against the numpy reference; and on a GPU where there is one."""

import numpy as np
import pytest
import torch

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.early_exit import MAX_CANDIDATES
from faser_trtllm.ops.prune_rows import rank_and_gap
from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.exit_cases import assert_equal_but_for_rounding, check_what_does_not_exist, expected, inputs, run


def check(launcher, device="cpu", dtype=torch.bfloat16):
    for seed, shape in enumerate(
        [
            {},
            {"hidden_size": 75},  # not a whole number of packs: entry by entry
            {"hidden_size": 2112, "num_candidates": 3, "vocab_size": 9},
            {"num_candidates": 1},
            {"num_candidates": MAX_CANDIDATES, "num_rows": 2},
            {"num_rows": 0},
        ]
    ):
        arguments = inputs(seed, dtype=dtype, **shape)
        assert_equal_but_for_rounding(run(launcher, arguments, device), expected(arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_the_reference(dtype):
    check(emulated("early_exit"), dtype=dtype)


def test_what_does_not_exist_has_no_score():
    check_what_does_not_exist(emulated("early_exit"))


def test_a_row_does_not_depend_on_the_others():
    launcher, arguments = emulated("early_exit"), inputs(2)
    hidden, rows, final_norm, lm_head, candidates, places = arguments
    together = run(launcher, arguments)[0]
    for i in range(5):
        one = slice(i, i + 1)
        alone = run(
            launcher, [hidden, rows[one].clone(), final_norm, lm_head, candidates[one].clone(), places[one].clone()]
        )
        np.testing.assert_array_equal(alone[0][0], together[i])


def test_memory_that_is_not_aligned_is_read_entry_by_entry():
    arguments = inputs(5)
    aligned = run(emulated("early_exit"), arguments)
    lm_head = arguments[3]
    shifted = torch.zeros(lm_head.numel() + 1, dtype=lm_head.dtype)[1:].view(lm_head.shape)
    shifted.copy_(lm_head)
    assert shifted.data_ptr() % 16
    arguments[3] = shifted
    assert_equal_but_for_rounding(run(emulated("early_exit"), arguments), aligned)


def test_the_reference_has_the_host_s_rank_and_gap():
    arguments = inputs(6, num_rows=30)
    scores, rank, gap = expected(arguments)
    wanted_rank, wanted_gap = rank_and_gap(scores, arguments[5].numpy())
    assert rank.tolist() == wanted_rank.tolist()
    assert gap.tolist() == wanted_gap.tolist()
    assert rank.max() > 3


def test_wrong_tensors_are_refused():
    wrong = {
        "hidden has type fp32; it must be bf16 or fp16": (0, lambda t: t.float()),
        r"rows has shape \[4\]; it must be \[5\]": (1, lambda t: t[:4]),
        "final_norm has type fp16; it must be bf16": (2, lambda t: t.half()),
        r"lm_head has shape \[50, 32\]; it must be \['any', 64\]": (3, lambda t: t[:, :32]),
        "lm_head is not contiguous": (3, lambda t: t.T.contiguous().T),
        "candidates has type int64": (4, lambda t: t.long()),
        "candidates has 40 per row; it must have 1 to 32": (4, lambda t: t.repeat(1, 5)),
    }
    for message, (index, change) in wrong.items():
        arguments = inputs(1)
        arguments[index] = change(arguments[index])
        with pytest.raises(InvalidArgumentError, match=message):
            run(None, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(on_gpu, dtype):
    module = on_gpu("early_exit")
    check(module, "cuda", dtype)
    check_what_does_not_exist(module, "cuda")
    arguments = inputs(9, num_hidden_rows=300, num_rows=257, hidden_size=4096, vocab_size=128_256, dtype=dtype)
    assert_equal_but_for_rounding(run(module, arguments, "cuda"), expected(arguments))
