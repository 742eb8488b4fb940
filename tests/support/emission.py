"""Texts by drafting and rejection sampling over tables of logits, and the distribution that they must have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import chisquare

from faser_trtllm import native
from faser_trtllm.ops.accept import AcceptResult, Outcome, accept
from lab.reference.sample import sample_draft
from tests.support.sampling_slots import Slots
from tests.support.toy_models import VOCAB_SIZE, ToyModel, target_probs

PROMPT = (0, 1)
KEY_STEP = 0x9E3779B97F4A7C15


def toy_logits(model: ToyModel) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(model.table).astype(np.float32)


def up_to_token_0(slot, tokens, known, drafts) -> int:
    """Looks at each draft up to the row's own token: survival falls along the request."""
    return next((j for j in range(drafts) if tokens[known + j] == 0), drafts)


def emit(
    slots: Slots,
    target: np.ndarray,
    draft: np.ndarray,
    length: int,
    *,
    num_drafts: int,
    verify: Callable[..., int] = up_to_token_0,
    accept: Callable[..., AcceptResult] = accept,
    certain_after=(),
) -> np.ndarray:
    """Generate `length` tokens after the prompts in every slot: all slots together, each at its own pace.

    target, draft: logits [vocab_size, vocab_size, vocab_size] by the last two tokens. verify(slot, tokens, known,
    pending) -> drafts to run rows for. certain_after: tokens after which a draft is the one that is next in number, and
    not drawn. Returns the texts [num_slots, length].
    """
    n, m, vocab_size = len(slots.array), slots.max_draft_len, slots.vocab_size
    prompt_len = int(slots.array["prompt_len"][0])
    committed, pending = np.full(n, prompt_len, np.int32), np.zeros(n, np.int32)
    limit = prompt_len + length
    active = np.arange(n, dtype=np.int32)
    while active.size:
        for _ in range(num_drafts):
            drafting = active[pending[active] < num_drafts]
            if not drafting.size:
                break
            known = committed[drafting] + pending[drafting]
            contexts = (slots.tokens[drafting, known - 2], slots.tokens[drafting, known - 1])
            sample_draft(slots.array, drafting, draft[contexts], vocab_size, known, m)
            certain = np.isin(contexts[1], certain_after)
            where = drafting[certain], known[certain]
            slots.tokens[where] = (contexts[1][certain] + 1) % vocab_size
            slots.draft_sources[where] = native.BY_SUFFIX
            pending[drafting] += 1
        added = [(s, int(committed[s]), int(pending[s])) for s in active.tolist()]
        num_rows = [1 + verify(slot, slots.tokens[slot], known, drafts) for slot, known, drafts in added]
        rows = [
            (slot, known + j) for (slot, known, _), count in zip(added, num_rows, strict=True) for j in range(count)
        ]
        where, position = np.array(rows).T
        logits = target[slots.tokens[where, position - 2], slots.tokens[where, position - 1]]
        cu_rows = np.cumsum([0, *num_rows], dtype=np.int32)
        found = accept(slots.array, active, logits, vocab_size, cu_rows, committed[active], pending[active], m)
        for i, slot in enumerate(active.tolist()):
            count, known = int(found.num_tokens[i]), int(committed[slot])
            slots.tokens[slot, known : known + count] = found.token_ids[i, :count]
            committed[slot] += count
            pending[slot] = pending[slot] - count if found.outcome[i] == Outcome.STILL_PENDING else 0
        active = active[committed[active] < limit]
    return slots.tokens[:, prompt_len:limit].copy()


def check_toy_texts(num_slots: int, length: int, mode: int, max_draft_len: int, **options) -> None:
    """Texts of the toy target with the toy draft's drafts have the target's distribution; options as emit has them."""
    target, draft = ToyModel(11), ToyModel(12)
    slots = Slots(num_slots, VOCAB_SIZE, max_draft_len, capacity=16)
    for slot in range(num_slots):
        slots.set(slot, tokens=PROMPT, prompt_len=2, mode=mode, key=slot * KEY_STEP % 2**64)
    texts = emit(slots, toy_logits(target), toy_logits(draft), length, **options)
    probs = {text: p for text, p in target_probs(target, PROMPT, length).items() if p > 0}
    seen, counts = np.unique(texts, axis=0, return_counts=True)
    observed = {tuple(text): count for text, count in zip(seen.tolist(), counts.tolist(), strict=True)}
    assert observed.keys() <= probs.keys()
    assert chisquare([observed.get(text, 0) for text in probs], [num_slots * p for p in probs.values()]).pvalue > 1e-3
