"""References of ops/cuda/sample.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, int32_at
from faser_trtllm.ops.draft_stop import sigmoid
from lab.reference.sample import sample_draft

if TYPE_CHECKING:
    from torch import Tensor
from faser_trtllm.ops.cuda.sample import Draws, StopTables


def sample_reference(
    draws: Draws, logits: Tensor, num_requests: int, edited_logits: Tensor | None = None, *, part_entries: int = 0
) -> None:
    """Do what sample() does, with the native library and tensors of the host; part_entries has no effect."""
    import torch

    step, (max_draft_len, _), vocab_size = int(draws.step[0]), draws.tokens.shape, draws.probs.shape[2]
    known, remaining = draws.known.numpy(), draws.remaining.numpy()
    table: Any = draws.entries.numpy().reshape(-1).view(SAMPLING_DTYPE)[:num_requests].copy()
    drawing = np.flatnonzero(remaining[:num_requests] > 0).astype(np.int32)
    draws.tokens[step, :num_requests] = -1
    # Set addresses so that indexing by the position of the drawn token reaches these arrays.
    candidates, margins = np.full((num_requests, NUM_CANDIDATES), -1, np.int32), np.zeros(num_requests, np.float32)
    histories, runners_up = [], np.full(num_requests, -1, np.int32)
    for i in drawing.tolist():
        count, entry = int(known[i]), table[i]
        history = np.zeros(count + 1, np.int32)
        if edited_logits is not None:
            history[:count] = int32_at(int(entry["tokens"]), count)
        histories.append(history)
        entry["tokens"] = history.ctypes.data
        entry["draft_margins"] = margins[i:].ctypes.data - 4 * count
        entry["draft_candidates"] = candidates[i:].ctypes.data - 4 * NUM_CANDIDATES * count
        entry["draft_runners_up"] = runners_up[i:].ctypes.data - 4 * count
        entry["draft_probs"] = draws.probs[int(draws.slots[i])].data_ptr()
        entry["draft_counter"] += np.uint64(step)
    if drawing.size:
        rows = np.ascontiguousarray(logits.numpy()[drawing])
        found = sample_draft(table, drawing, rows, vocab_size, known[drawing].copy(), max_draft_len)
        draws.tokens[step].index_copy_(0, torch.from_numpy(drawing).long(), torch.from_numpy(found))
    draws.margins[step, :num_requests] = torch.from_numpy(margins)
    draws.candidates[step, :num_requests] = torch.from_numpy(candidates)
    if draws.runners_up is not None:
        draws.runners_up[step, :num_requests] = torch.from_numpy(runners_up)


def advance_reference(draws: Draws, stop: StopTables, num_requests: int, *, has_history: bool = False) -> None:
    """Do what advance() does, on tensors of the host."""
    step, (_, max_requests), width = int(draws.step[0]), draws.tokens.shape, stop.row_price.shape[0]
    tokens, margins, modes = draws.tokens[step].tolist(), draws.margins[step].tolist(), stop.modes.tolist()
    table: Any = draws.entries.numpy().reshape(-1).view(SAMPLING_DTYPE)
    slope, intercept, prior, spread = stop.tables.tolist()
    going, gain = [], 0.0
    for i in range(num_requests):
        is_new = tokens[i] >= 0 and int(draws.remaining[i]) > 0
        draws.newest[i] = tokens[i] if is_new else 0
        draws.remaining[i] = int(draws.remaining[i]) - 1 if is_new else 0
        if is_new:
            position = int(draws.known[i])
            if has_history:
                int32_at(int(table[i]["tokens"]), position + 1)[position] = tokens[i]
            draws.known[i] = position + 1
        if not draws.remaining[i]:
            continue
        place = min(int(stop.pending[i]), width - 1)
        logit = slope[modes[i]][place] * margins[i] + intercept[modes[i]][place]
        stop.survival[i] *= sigmoid(logit)
        stop.pending[i] = place + 1
        mode, following = modes[i], min(place + 1, width - 1)
        high, low = (
            float(stop.survival[i]) * probability - float(stop.row_price[following])
            for probability in (prior[mode][following] + sign * spread[mode][following] for sign in (1.0, -1.0))
        )
        worth = high if high < 0.0 else 0.5 * (high + max(low, 0.0))
        if worth >= 0.0:
            going.append(i)
            gain += worth
    if gain < float(stop.step_price[min(len(going), max_requests)]):
        going = []
    for i in set(range(num_requests)) - set(going):
        draws.remaining[i] = 0
    stop.num_going[0] = len(going)
    draws.step[0] = step + 1
