"""The candidate-only projection between two segments, as a network of its own: it runs only where it is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np

from faser_trtllm.builder.network.decoder import head_name
from faser_trtllm.builder.network.graph import Graph
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork, finish
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.weights import Weights


def build_early_exit(
    trt: Any, network: Any, config: ModelConfig, weights: Weights, options: NetworkOptions
) -> SegmentNetwork:
    """Fill an empty network with what ops/early_exit.py says of some hidden rows.

    hidden_in [rows, hidden_size] of the options' dtype: a segment's hidden_out. exit_rows i32 [exit_rows]: indices of
    hidden rows. candidates i32 [exit_rows, num_candidates]: token ids, negative for none. scores fp32 [exit_rows,
    num_candidates]: the LM head's, -inf for none. One network serves all boundaries; its engine holds the LM head.
    """
    graph = Graph(trt, network, options, weights)
    hidden, num_candidates = config.hidden_size, options.num_candidates
    x = graph.add_input("hidden_in", options.dtype, "rows", hidden)
    rows = graph.add_input("exit_rows", "int32", "exit_rows")
    candidates = graph.add_input("candidates", "int32", "exit_rows", num_candidates)
    x = graph.rms_norm_float32(graph.gather(x, rows), "model.norm", hidden, config.rms_norm_eps)
    x = graph.reshape(x, 0, 1, hidden)
    zero = graph.literal("first_token_id", np.zeros((1, 1), np.int32))
    head = graph.matrix(head_name(config), num_in=hidden, num_out=(config.vocab_size,))
    head_rows = graph.gather(head, graph.elementwise(candidates, zero, "MAX"))
    products = graph.elementwise(x, graph.cast(head_rows, trt.float32), "PROD")
    scores = network.add_reduce(products, trt.ReduceOperation.SUM, 1 << 2, False).get_output(0)
    nothing = graph.literal("no_candidate", np.full((1, 1), -np.inf, np.float32))
    scores = network.add_select(graph.elementwise(candidates, zero, "LESS"), nothing, scores).get_output(0)
    graph.mark_output(scores, "scores", "float32", "exit_rows", num_candidates)
    return finish(graph, "early_exit", "native", ())
