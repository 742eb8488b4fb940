"""The tensors of a response, without a server."""

import json

import numpy as np
import pytest

from faser_trtllm.serving.text.request import ContextLogProbs, TextOutput, TextRequest, TopLogProbs
from faser_trtllm.serving.triton.contract import BLS, FASER
from faser_trtllm.serving.triton.reply import output_tensors
from faser_trtllm.serving.triton.request import Part, RequestedStats

INF = float("inf")


@pytest.mark.parametrize("contract", [FASER, BLS])
def test_numbers_that_json_cannot_say_are_the_least_that_it_can(contract):
    """Triton's HTTP writes tensors as JSON, whose numbers are finite."""
    tops = TopLogProbs(np.array([1, 2], np.int32).tobytes(), np.array([-0.5, -INF], np.float32).tobytes())
    request = TextRequest(
        text="a",
        return_log_probs=True,
        return_context_log_probs=True,
        num_top_log_probs=2,
        return_generation_logits=True,
    )
    output = TextOutput(
        "b",
        (2,),
        log_probs=(-INF,),
        logits=np.array([-INF, 3.5], np.float32).tobytes(),
        tops=tops,
        context=ContextLogProbs((1, 2), (-INF,), tops),
    )
    part = Part(request, None, None, RequestedStats({}, contract))
    tensors = output_tensors(contract, part, output, [-INF], -INF)
    least = float(np.finfo(np.float32).min)
    expected = {
        "output_log_probs": [-9999.0],
        "cum_log_probs": [least],
        "output_top_log_probs": [-0.5, -9999.0],
        "context_log_probs": [-9999.0],
        "context_top_log_probs": [-0.5, -9999.0],
        "generation_logits": [least, 3.5],
    }
    assert {name: tensors[name].reshape(-1).tolist() for name in expected} == expected
    floats = {name: array.tolist() for name, array in tensors.items() if array.dtype == np.float32}
    assert json.dumps(floats, allow_nan=False)
