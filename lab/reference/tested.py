"""References of ops/tested.py."""

from __future__ import annotations

from faser_trtllm import native
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.ops.arrays import Int32Array, SamplingArray
from faser_trtllm.ops.tested import NUM_BINS, TestedSums
from lab.reference.acceptance import is_certain, pending_margins


def add_reference(
    sums: TestedSums,
    model: AcceptanceModel,
    sampling: SamplingArray,
    slots: Int32Array,
    num_tokens: Int32Array,
    num_accepted: Int32Array,
    outcome: Int32Array,
) -> None:
    """Do what TestedSums.add() does, in plain loops. model: the one that `sums` was made with."""
    columns = (column.tolist() for column in (slots, num_tokens, num_accepted, outcome))
    for slot, tokens, accepted, how in zip(*columns, strict=True):
        num_tested = accepted + (how == native.RECOVERED)
        mode = int(sampling[slot]["mode"])
        for place, m in enumerate(pending_margins(sampling, slot, tokens, num_tested)):
            if is_certain(sampling[slot], tokens + place):
                continue  # its drafter learns from committed tokens
            p = model.at(mode, place, m)
            y = float(place < accepted)
            error, w = y - p, p * (1.0 - p)
            sums.cells[mode, place] += (1.0, y, error * m, error, w * m * m, w * m, w)
            sums.bins[:, min(int(p * NUM_BINS), NUM_BINS - 1)] += (1.0, p, y)
