"""Times of the parts of a step, for a target and its draft model on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.gpu import Gpu
from lab.costmodel.passes import PassModel
from lab.costmodel.shape import ModelShape
from lab.costmodel.traffic import Traffic

CATCH_UP_ROWS = 1.5  # unseen rows per request in a draft call's first step


@dataclass(frozen=True)
class HostTimes:
    """Times of the host, which are not modeled. Those of a step, call and boundary were measured on an H100.

    step_ms: a step without its passes. draft_call_ms: a draft call without its steps.
    draft_step_ms: drawing and bookkeeping of a draft step.
    test_row_ms: rejection sampling, per row.
    boundary_ms: between two segments, where the host chooses rows and launches the next graph.
    score_row_ms: candidate scores of a boundary, per row.
    """

    step_ms: float = 0.6
    draft_call_ms: float = 0.35
    draft_step_ms: float = 0.03
    test_row_ms: float = 0.0005
    boundary_ms: float = 0.34
    score_row_ms: float = 0.00005


class Pair:
    """A pair on one GPU. draft_sms: SMs for drafting in overlapped steps; the target has the others."""

    def __init__(
        self,
        gpu: Gpu,
        target: ModelShape,
        draft: ModelShape,
        *,
        host: HostTimes | None = None,
        draft_sms: int | None = None,
        is_ours: bool = True,
    ) -> None:
        self.gpu, self.host = gpu, host or HostTimes()
        self.target, self.draft = PassModel(gpu, target, is_ours=is_ours), PassModel(gpu, draft, is_ours=is_ours)
        self.draft_sms = gpu.split(0.25) if draft_sms is None else draft_sms
        if not 0 < self.draft_sms < gpu.num_sms or self.draft_sms % gpu.sm_step:
            raise InvalidArgumentError(
                f"draft_sms is {draft_sms}, a green context of {gpu.name} has a multiple of {gpu.sm_step} SMs, fewer "
                f"than all {gpu.num_sms}"
            )

    @property
    def draft_share(self) -> float:
        """The draft's share of the SMs in overlapped steps."""
        return self.draft_sms / self.gpu.num_sms

    @property
    def traffic(self) -> Traffic:
        target, draft, gpu = self.target.shape, self.draft.shape, self.gpu
        return Traffic(
            gb={"target": target.pass_gb, "draft": draft.pass_gb},
            gb_per_token={"target": target.token_gb, "draft": draft.token_gb},
            gb_per_ms={
                "all": gpu.gb_per_ms,
                "draft": gpu.gb_per_ms * gpu.bandwidth_share(self.draft_share),
                "verify": gpu.gb_per_ms * gpu.bandwidth_share(1.0 - self.draft_share),
            },
        )

    def verify_ms(self, num_rows: float, num_requests: float, context_len: float, sm_share: float = 1.0) -> float:
        """Return the time of a target pass with rejection sampling."""
        ms = self.target.ms(num_rows, num_requests, context_len, sm_share=sm_share)
        return ms + self.host.test_row_ms * num_rows

    def draft_rows_ms(self, num_rows: float, num_requests: float, context_len: float, sm_share: float = 1.0) -> float:
        """Return the time of a draft call's first step, with unseen rows and a draw per request, or with all blocks."""
        if self.draft.shape.block_size:
            blocks = self.draft.shape.block_size * num_requests
            ms = self.draft.ms(blocks, num_requests, context_len, sm_share=sm_share)
            ms += self.draft.context_ms(num_rows, sm_share)
        else:
            ms = self.draft.ms(num_rows, num_requests, context_len, sm_share=sm_share)
        return ms + self.host.draft_step_ms + self.host.draft_call_ms

    def draft_step_ms(self, num_requests: float, context_len: float, sm_share: float = 1.0) -> float:
        """Return the time of a later step: a pass with a row per request, but only a draw for a block drafter."""
        if self.draft.shape.block_size:
            return self.host.draft_step_ms
        return self.draft.ms(num_requests, num_requests, context_len, sm_share=sm_share) + self.host.draft_step_ms

    def drafting_gb(self, length: int, num_requests: float, context_len: float) -> float:
        """Return the GB that a draft call of `length` steps reads."""
        passes = min(1, length) if self.draft.shape.block_size else length
        return passes * self.draft.pass_gb(num_requests, context_len)

    def drafting_ms(self, length: int, num_requests: float, context_len: float, sm_share: float = 1.0) -> float:
        """Return the time of a draft call of `length` steps."""
        if length == 0:
            return 0.0
        first = self.draft_rows_ms(CATCH_UP_ROWS * num_requests, num_requests, context_len, sm_share)
        return first + (length - 1) * self.draft_step_ms(num_requests, context_len, sm_share)
