"""Build the network that runs between two segments when rows may be pruned.

It scores the draft's candidates and, with our plugins, chooses the rows that stay and compacts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from faser_trtllm.builder.network.decoder import head_name
from faser_trtllm.builder.network.graph import Graph
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork, finish
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.weights import Weights

RULE_SIZE = 5  # length of PruneRule.weights()
PLUGINS = ("faser::early_exit", "faser::prune_rows", "faser::compact_rows")


def build_early_exit(
    trt: Any, network: Any, config: ModelConfig, weights: Weights, options: NetworkOptions
) -> SegmentNetwork:
    """Fill an empty network that computes what plugins/cpu/early_exit.cpp and, with plugins, ops/prune_rows.py do.

    One network serves all boundaries; its plan contains the LM head. Its inputs and outputs are
    - hidden_in [rows, hidden_size], a segment's hidden_out in the options' dtype;
    - exit_rows i32 [exit_rows], indices of hidden rows;
    - candidates i32 [exit_rows, num_candidates], token ids, negative for none;
    - scores fp32 [exit_rows, num_candidates], from the LM head, -inf for none;
    - with plugins the inputs of ops/cuda/prune_rows.py, and its outputs kept i32 [batch] and hidden_out: the rows that
      stay, followed by zeros.
    """
    if hasattr(network, "add_plugin"):
        return _with_plugins(trt, network, config, weights, options)
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


def _with_plugins(
    trt: Any, network: Any, config: ModelConfig, weights: Weights, options: NetworkOptions
) -> SegmentNetwork:
    graph = Graph(trt, network, options, weights)
    ops, size, num_candidates = trt.plugin.op.faser, config.hidden_size, options.num_candidates
    hidden = graph.add_input("hidden_in", options.dtype, "rows", size)
    rows = graph.add_input("exit_rows", "int32", "exit_rows")
    candidates = graph.add_input("candidates", "int32", "exit_rows", num_candidates)
    places = graph.add_input("places", "int32", "exit_rows")
    before = graph.add_input("before", "float32", "exit_rows")
    cu_drafts = graph.add_input("cu_drafts", "int32", "batch_plus_one")
    starts = graph.add_input("starts", "int32", "batch")
    rule = graph.add_input("rule", "float32", RULE_SIZE)
    positions = graph.add_input("positions", "int32", "rows")
    cu_q_lens = graph.add_input("cu_q_lens", "int32", "batch_plus_one")
    kv_lens = graph.add_input("kv_lens", "int32", "batch")
    norm = graph.vector("model.norm", size)
    head = graph.matrix(head_name(config), num_in=size, num_out=(config.vocab_size,))

    def call(name: str, *arguments: Any) -> Any:
        layer = network.add_plugin(getattr(ops, name)(*arguments), aot=True)
        layer.name = name
        return layer

    exits = call("early_exit", hidden, rows, norm, head, candidates, places, config.rms_norm_eps)
    scores = exits.get_output(0)
    pruned = call("prune_rows", scores, places, before, cu_drafts, starts, rule, positions)
    listed = pruned.get_output(1)
    compacted = call("compact_rows", hidden, positions, listed, cu_q_lens, kv_lens, options.max_seq_len)
    graph.mark_output(scores, "scores", "float32", "exit_rows", num_candidates)
    graph.mark_output(pruned.get_output(0), "kept", "int32", "batch")
    graph.mark_output(compacted.get_output(0), "hidden_out", options.dtype, "rows", size)
    return finish(graph, "early_exit", "plugin", PLUGINS)
