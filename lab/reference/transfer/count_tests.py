"""References of ops/transfer/count_tests.py."""

from __future__ import annotations

from faser_trtllm import native
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int8_at


def count_tests_reference(
    sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_accepted: Int32Array, outcome: Int32Array
) -> None:
    """Do what count_tests() does, in plain loops."""
    for slot, known, accepted, how in zip(slots, num_tokens, num_accepted, outcome, strict=True):
        entry = sampling[slot]
        num_tested = int(accepted) + (int(how) == native.RECOVERED)
        sources = int8_at(int(entry["draft_sources"]), int(known) + num_tested)[int(known) :]
        for place in range(num_tested):
            source = native.BY_SUFFIX if sources.size and sources[place] != native.BY_MODEL else native.BY_MODEL
            entry["num_tested"][source] += 1
            entry["num_passed"][source] += place < accepted
