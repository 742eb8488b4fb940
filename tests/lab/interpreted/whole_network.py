"""All layers of a tiny model as one network, run pass by pass by the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from faser_trtllm.builder.network.fp8 import Fp8Layers
from faser_trtllm.builder.network.inputs import native_inputs
from faser_trtllm.builder.network.segment import build_segment, create_network
from faser_trtllm.core.batch import BatchBuilder, RaggedBatch
from lab.interpreted.interpreter import Interpreter
from tests.support.networks import load_trt, new_builder, options
from tests.support.plugin_stand_in import StandInNetwork, StandInTrt

trt = load_trt()

TOLERANCE = 5e-5
SLOTS, BLOCK, MAX_SEQ_LEN = 4, 16, 96
# Rows (slot, first, end) of each pass: prompts in chunks, frontiers, rows that overwrite rejected ones, idle slots.
PASSES = (
    ((2, 0, 9), (0, 0, 21)),
    ((0, 21, 26), (2, 9, 30), (1, 0, 3)),
    ((1, 2, 7), (0, 23, 24)),
    ((3, 0, 33), (0, 24, 30), (2, 30, 31), (1, 7, 8)),
)


class Whole:
    """All layers as one network of a flavour, with caches of its own."""

    def __init__(self, model: Any, is_plugin: bool, fp8: Fp8Layers | None = None) -> None:
        config = model[0]
        block = BLOCK if is_plugin else MAX_SEQ_LEN
        self._options = options(max_batch_size=SLOTS, max_seq_len=MAX_SEQ_LEN, tokens_per_block=block)
        self._builder = new_builder(trt)
        network = create_network(trt, self._builder)
        self._is_plugin = is_plugin
        nodes = []
        if is_plugin:
            network = StandInNetwork(network, config.num_heads, trt)
            self.segment = build_segment(StandInTrt(trt), network, *model, 0, config.num_layers, self._options, fp8)
            nodes = network.plugin_nodes()
        else:
            self.segment = build_segment(trt, network, *model, 0, config.num_layers, self._options, fp8)
        self.interpreter = Interpreter(trt, network, self.segment.weights, nodes)
        num_blocks = SLOTS * MAX_SEQ_LEN // block
        shape = (num_blocks, config.num_kv_heads, block, config.head_dim)
        self.caches = {name: torch.zeros(shape) for name in self.interpreter.input_names if "_cache_" in name}
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self.block_table = order.reshape(SLOTS, -1)

    def run(self, passes) -> list[np.ndarray]:
        builder = BatchBuilder(self.block_table)
        results = []
        for number, rows in enumerate(passes):
            builder.clear()
            for slot, first, end in rows:  # tokens differ from pass to pass: what is overwritten was wrong
                tokens = np.random.default_rng(slot).integers(0, 320, MAX_SEQ_LEN).astype(np.int32)
                tokens[first + 1 : end] = (tokens[first + 1 : end] + number) % 320
                builder.add(slot, tokens, first, end, end - first)
            results.append(self._logits(builder.build()))
        return results

    def _logits(self, batch: RaggedBatch) -> np.ndarray:
        if self._is_plugin:
            arrays = plugin_inputs(batch)
        else:
            arrays = native_inputs(batch, batch.block_table[batch.slots, 0], SLOTS, MAX_SEQ_LEN).arrays
        feeds = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        return self.interpreter.run(feeds | self.caches)["logits"].numpy()


def plugin_inputs(batch: RaggedBatch) -> dict[str, np.ndarray]:
    """Inputs of a network of the plugin flavour: rows unchanged, one block table row per request."""
    return {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "cu_q_lens": batch.cu_rows,
        "kv_lens": batch.positions[batch.cu_rows[1:] - 1] + 1,
        "block_table": batch.block_table[batch.slots],
        "logit_rows": batch.logit_rows,
    }
