"""Open a directory's CPU engines on core sets, for a profile."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.cost_table import ALL
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.probe import Probe, probe_sizes
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.rejection import CpuRejectionSampler

MAX_ROWS, QUICK_MAX_ROWS = 320, 128
MAX_REQUESTS = 32
QUICK_SLOTS = 2  # slots with their own caches in a quick profile


class CpuProbe(Probe):
    """A probe of CPU engines. "all" is every core; with two or more "draft" is the last one and "verify" the others."""

    def __init__(
        self, engines: EngineDir, cores: tuple[int, ...] | None, num_threads: int | None, quick: bool = False
    ) -> None:
        """Open the engines.

        quick: at most QUICK_MAX_ROWS rows per pass, and no contexts above the main one. Only QUICK_SLOTS slots have
        caches, which the others share, since filling all would take longer than the quick grid.
        """
        max_rows = QUICK_MAX_ROWS if quick else MAX_ROWS
        limits, needed, num_blocks = probe_sizes(engines.build_config, quick, max_rows, MAX_REQUESTS)
        num_slots, draft_len, vocab_size = needed.max_batch_size, needed.max_draft_len, engines.vocab_size
        sizes = {"num_blocks": num_blocks} | asdict(needed)
        del sizes["max_draft_len"]
        with ExitStack() as guard:
            stack = guard.enter_context(ExitStack())
            everything = stack.enter_context(CoreSet(cores, num_threads))
            core_sets = {ALL: everything}
            used = everything.cores[: everything.num_threads]
            if len(used) >= 2:
                core_sets["verify"] = stack.enter_context(CoreSet(used[:-1]))
                core_sets["draft"] = stack.enter_context(CoreSet(used[-1:]))
            self.num_units = self.num_threads = everything.num_threads
            target = stack.enter_context(CpuEngine.open(engines.target_path, everything, **sizes))
            draft = None
            if engines.has_draft:
                draft = stack.enter_context(CpuEngine.open(engines.draft_path, everything, **sizes))
                if draft.spec.reads_target:
                    draft.attach(target)
            sampler = CpuRejectionSampler(vocab_size, draft_len, HostDraftProbs(num_slots, draft_len, vocab_size))
            num_filled = min(num_slots, QUICK_SLOTS) if quick else num_slots
            super().__init__(target, draft, sampler, core_sets, limits, num_filled, stack)
            guard.pop_all()

    def pin(self, partition: str) -> None:
        if partition != ALL:
            self._places[partition].pin_caller()
