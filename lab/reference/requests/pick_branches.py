"""References of ops/requests/pick_branches.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm.ops.acceptance import MAX_MARGIN, AcceptanceModel
from faser_trtllm.ops.arrays import (
    Int32Array,
    SamplingArray,
    float32_at,
    int32_at,
)
from faser_trtllm.ops.draft_stop import sigmoid
from lab.reference.acceptance import is_certain

SHARE = (0.6, 0.43, 0.29)  # by sampling mode, the share of rejections that the runner-up recovers (kShare)


def pick_branches_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    num_tokens: Int32Array,
    num_pending: Int32Array,
    num_verified: Int32Array,
    acceptance: AcceptanceModel,
    min_worth: float | None,
    max_branches: int,
    max_num: int,
) -> Int32Array:
    """Do what BranchPicker.pick() does, in plain loops."""
    branches: list[tuple[int, int, int]] = []
    columns = (column.tolist() for column in (slots, num_tokens, num_pending, num_verified))
    for i, (slot, known, pending, length) in enumerate(zip(*columns, strict=True)):
        entry = sampling[slot]
        found = []
        reached = [1.0]
        for place in range(min(length + 1, pending)):
            position = known + place
            margin = float(float32_at(int(entry["draft_margins"]), position + 1)[-1])
            if is_certain(entry, position):
                accepted = sigmoid(margin)
            else:
                accepted = acceptance.at(int(entry["mode"]), place, min(margin, MAX_MARGIN))
            token = int(int32_at(int(entry["draft_runners_up"]), position + 1)[-1])
            if token >= 0 and not is_certain(entry, position):
                found.append((SHARE[entry["mode"]] * reached[-1] * (1.0 - accepted), place, token))
            reached.append(reached[-1] * accepted)
        best = sorted(found, key=lambda branch: -branch[0])[: min(max_branches, max_num - len(branches))]
        if min_worth is None:
            best = [b for k, b in enumerate(best) if k < length and b[0] > reached[length - k]]
            length -= len(best)
        taken = [b for b in best if min_worth is None or b[0] >= min_worth]
        for _, place, token in sorted(taken, key=lambda branch: branch[1]):
            branches.append((i, place, token))
        num_verified[i] = length
    picked: Int32Array = np.array(branches, np.int32).reshape(-1, 3).T
    return picked
