"""The CPU engines of a directory on core sets, for a profile."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.cost_table import ALL
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.grid import Limits
from faser_trtllm.profiling.probe import Probe, context_limits, largest_context, probe_draft_len
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.rejection import CpuRejectionSampler

MAX_ROWS, QUICK_MAX_ROWS = 320, 128
MAX_REQUESTS = 32
QUICK_SLOTS = 2  # with caches of their own in a quick profile


class CpuProbe(Probe):
    """Partitions: "all" is every core; with two cores or more "draft" is the last one and "verify" the others."""

    def __init__(
        self, engines: EngineDir, cores: tuple[int, ...] | None, num_threads: int | None, quick: bool = False
    ) -> None:
        """quick: passes of QUICK_MAX_ROWS rows at most and caches of the main context only; all but the first
        QUICK_SLOTS slots read those of others, since filling them all would take longer than the quick grid."""
        built = engines.build_config
        max_draft_len = max(1, built.max_draft_len)
        max_context, max_seq_len = context_limits(built.max_seq_len, max_draft_len, largest_context(quick))
        limits = Limits(
            max_rows=min(QUICK_MAX_ROWS if quick else MAX_ROWS, built.max_num_tokens),
            max_num_requests=min(MAX_REQUESTS, built.max_batch_size),
            max_context=max_context,
            max_draft_len=built.max_draft_len,
        )
        num_slots = limits.max_num_requests
        sizes = {
            "num_blocks": num_slots * -(-max_seq_len // built.tokens_per_block),
            "tokens_per_block": built.tokens_per_block,
            "max_batch_size": num_slots,
            "max_num_tokens": max(limits.max_rows, num_slots),
            "max_seq_len": max_seq_len,
        }
        with ExitStack() as guard:
            stack = guard.enter_context(ExitStack())
            everything = stack.enter_context(CoreSet(cores, num_threads))
            self._core_sets = {ALL: everything}
            used = everything.cores[: everything.num_threads]
            if len(used) >= 2:
                self._core_sets["verify"] = stack.enter_context(CoreSet(used[:-1]))
                self._core_sets["draft"] = stack.enter_context(CoreSet(used[-1:]))
            self.partitions = tuple(self._core_sets)
            self.num_units = everything.num_threads
            target = stack.enter_context(CpuEngine.open(engines.target_path, everything, **sizes))
            draft = None
            if engines.has_draft:
                draft = stack.enter_context(CpuEngine.open(engines.draft_path, everything, **sizes))
                if draft.spec.is_head:
                    draft.attach(target)
            draft_len, vocab_size = probe_draft_len(max_draft_len), engines.vocab_size
            sampler = CpuRejectionSampler(vocab_size, draft_len, HostDraftProbs(num_slots, draft_len, vocab_size))
            num_filled = min(num_slots, QUICK_SLOTS) if quick else num_slots
            super().__init__(target, draft, sampler, limits, num_filled, stack)
            guard.pop_all()

    def use(self, partition: str, engine: Any = None) -> None:
        for each in (self.target, self.draft) if engine is None else (engine,):
            if each is not None:
                each.use(self._core_sets[partition])

    def pin(self, partition: str) -> None:
        if partition != ALL:
            self._core_sets[partition].pin_caller()
