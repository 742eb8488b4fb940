"""The accept kernel with a device's number of threads: a second build of its file, hence in a process of its own."""

import numpy as np
import torch

from faser_trtllm import native
from lab.reference.accept import accept_reference
from tests.ops.cuda.accept_batches import FIELDS, run
from tests.ops.cuda.emulation import emulated
from tests.support.sampling_slots import Slots


def compare_whole_blocks():
    """512 threads as on a device, over a vocabulary that takes several levels; a few rows, since it is slow."""
    rng = np.random.default_rng(5)
    vocab_size, settings_of = (
        20_000,
        [{"top_k": 700}, {"top_p": 0.97}, {"top_k": 5000, "top_p": 0.5, "min_p": 0.01}, {}],
    )
    n = len(settings_of) * 2
    slots = Slots(n, vocab_size, 1)
    slots.draft_probs[:] = rng.dirichlet(np.ones(vocab_size), (n, 1))
    for slot in range(n):
        mode = native.SEEDED if slot % 2 else native.SAMPLED
        slots.set(slot, tokens=[1, 7], mode=mode, key=slot, temperature=1.5, **settings_of[slot // 2])
    slots.draft_sources[n // 2 :] = native.BY_SUFFIX
    logits = torch.from_numpy(rng.standard_normal((n, vocab_size)).astype(np.float32) * 3).bfloat16()
    slot_ids, ones = np.arange(n, dtype=np.int32), np.ones(n, np.int32)
    rest = (vocab_size, np.arange(n + 1, dtype=np.int32), ones, ones, 1)
    expected = accept_reference(slots.array, slot_ids, logits.float().numpy(), *rest)
    found = run(emulated("accept"), slots.array, slot_ids, logits, *rest)
    for name in FIELDS:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
