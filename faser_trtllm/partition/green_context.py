"""Partitions of a GPU for draft and target: SMs split into green contexts with a stream each, or two plain streams.

A green context is a mask of SMs over the primary context: memory, modules and events are shared, and work on its
streams stays on its SMs. An H100 granted splits as asked (2026-11-26); tests make the calls through cuda-python's
bindings over a stand-in driver.

Streams and their contexts live as long as the process, like torch's own streams. torch keeps state by stream (cached
memory, workspaces, events), cannot forget a stream, and aborts the process if a driver then refuses one that is gone.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import ConfigError, FaserError
from faser_trtllm.ops.cuda.driver import call_driver, ensure_context, load_driver, num_sms

log = logging.getLogger(__name__)

_NON_BLOCKING = 1  # an int, since newer bindings lack or rename these enums
_DEFAULT_STREAM = 1
_GREEN_CALLS = (
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
    "cuGreenCtxGetDevResource",
    "cuGreenCtxDestroy",
)


@dataclass(frozen=True, slots=True)
class GpuPartition:
    """A share of a GPU: work on its stream (a CUstream as an int) stays on its num_sms SMs."""

    name: str
    stream: int
    num_sms: int


@dataclass(frozen=True, slots=True)
class PartitionPair:
    """The draft's and the target's shares of one GPU: disjoint SMs, or with plain streams all SMs for both."""

    draft: GpuPartition
    target: GpuPartition


def default_draft_sms(device_sms: int) -> tuple[int, ...]:
    """Return the draft's SM counts of the pairs to prepare: one pair, with a quarter of the GPU in multiples of 8.

    On modeled GPUs this is the best split for a 1B draft of an 8B target at 256 requests, where overlap comes closest
    to saving time; where other splits are better, no split saves any (docs/results.md).
    """
    return (max(8, device_sms // 4 // 8 * 8),)


class _Division(NamedTuple):
    kind: str
    whole: GpuPartition
    pairs: tuple[PartitionPair, ...]


_given_back: defaultdict[tuple[Any, ...], list[_Division]] = defaultdict(list)  # by the arguments they were made for


class GpuPartitions(Closing):
    """The whole GPU, and pairs that divide it between a draft and a target; none is created while serving.

    Attributes:
        whole: a stream of the primary context.
        pairs: one per entry of draft_sms, with the SM counts that the driver granted.
        kind: "green"; or "streams", if asked for or if the driver has no green contexts. Then there is one pair, whose
            sides both have every SM.

    The streams are exclusive until close(), or until the end of a `with` block.
    """

    def __init__(
        self,
        draft_sms: Sequence[int] | None = None,
        ordinal: int = 0,
        *,
        require_green: bool = False,
        plain_streams: bool = False,
    ) -> None:
        """draft_sms: None: default_draft_sms(). require_green: raise FaserError instead of falling back to streams.
        plain_streams: make no green contexts.

        Raises ConfigError if cuda-python or a driver is missing, or if the GPU cannot be divided this way.
        """
        self._driver = load_driver()
        self.num_sms = num_sms(ordinal)
        counts = tuple(draft_sms) if draft_sms is not None else default_draft_sms(self.num_sms)
        for count in counts:
            if not 1 <= count < self.num_sms:
                raise ConfigError(
                    f"draft_sms has {count}; it must be 1 to {self.num_sms - 1}, which leaves the target at least one "
                    f"of the GPU's {self.num_sms} SMs"
                )
        self._given_back = _given_back[ordinal, counts, require_green, plain_streams]
        self._division = (
            self._given_back.pop() if self._given_back else self._make(counts, ordinal, require_green, plain_streams)
        )
        self.kind, self.whole, self.pairs = self._division
        self._is_closed = False

    @property
    def partitions(self) -> tuple[GpuPartition, ...]:
        """All partitions, the whole GPU first."""
        return (self.whole, *(side for pair in self.pairs for side in (pair.draft, pair.target)))

    def close(self) -> None:
        """Give the streams back for the next object in this process with the same arguments. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._given_back.append(self._division)

    def _make(self, counts: Sequence[int], ordinal: int, require_green: bool, plain_streams: bool) -> _Division:
        with ExitStack() as made:  # destroyed only if something cannot be made: torch has not seen any of them yet
            ensure_context(self._driver)
            self._device = self._call("cuDeviceGet", ordinal)
            whole = GpuPartition("whole", self._stream(made), self.num_sms)
            kind, pairs = "green", () if plain_streams else self._green_pairs(counts, require_green, made)
            if not pairs and counts:
                kind, pairs = "streams", (self._stream_pair(made),)
            made.pop_all()
        return _Division(kind, whole, pairs)

    def _green_pairs(self, counts: Sequence[int], require_green: bool, made: ExitStack) -> tuple[PartitionPair, ...]:
        reason = next((f"cuda-python has no {name}" for name in _GREEN_CALLS if not hasattr(self._driver, name)), "")
        pairs: list[PartitionPair] = []
        if not reason:
            # If one pair fails, drop those made before it: half of the requested pairs would be misleading.
            with ExitStack() as made_here:
                try:
                    pairs = [self._green_pair(count, made_here) for count in counts]
                except (FaserError, RuntimeError) as error:  # a driver older than the bindings lacks the functions
                    reason = str(error)
                else:
                    made.enter_context(made_here.pop_all())
        if reason and require_green:
            raise FaserError(f"green contexts cannot be made: {reason}; a driver for CUDA 12.4 or newer has them")
        if reason:
            log.warning(
                "green contexts cannot be made (%s): draft and target share all %d SMs, on two streams",
                reason,
                self.num_sms,
            )
            return ()
        return tuple(pairs)

    def _green_pair(self, draft_sms: int, made: ExitStack) -> PartitionPair:
        sm = self._driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._call("cuDeviceGetDevResource", self._device, sm)
        # Both sides of a pair come from this one call: two splits of a device may overlap.
        groups, found, rest = self._call("cuDevSmResourceSplitByCount", 1, whole, 0, draft_sms)
        if found != 1 or rest.sm.smCount == 0:
            raise FaserError(f"{draft_sms} of {whole.sm.smCount} SMs for the draft leave nothing for the target")
        name = f"{groups[0].sm.smCount}:{rest.sm.smCount}"
        draft = self._green(f"draft {name}", groups[0], made)
        return PartitionPair(draft, self._green(f"target {name}", rest, made))

    def _green(self, name: str, resource: Any, made: ExitStack) -> GpuPartition:
        description = self._call("cuDevResourceGenerateDesc", [resource], 1)
        context = self._call("cuGreenCtxCreate", description, self._device, _DEFAULT_STREAM)
        made.callback(self._call, "cuGreenCtxDestroy", context)
        stream = self._call("cuGreenCtxStreamCreate", context, _NON_BLOCKING, 0)
        made.callback(self._call, "cuStreamDestroy", stream)
        sm = self._driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        granted = int(self._call("cuGreenCtxGetDevResource", context, sm).sm.smCount)
        if granted < resource.sm.smCount:
            log.warning("partition %s was granted %d SMs, %d were asked for", name, granted, resource.sm.smCount)
        return GpuPartition(name, int(stream), granted)

    def _stream_pair(self, made: ExitStack) -> PartitionPair:
        """Make two streams without priorities: on an H100, a priority for the draft changed no time (2026-11-26)."""
        draft, target = (self._stream(made) for _ in range(2))
        return PartitionPair(
            GpuPartition("draft stream", draft, self.num_sms), GpuPartition("target stream", target, self.num_sms)
        )

    def _stream(self, made: ExitStack) -> int:
        stream = self._call("cuStreamCreate", _NON_BLOCKING)
        made.callback(self._call, "cuStreamDestroy", stream)
        return int(stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        return call_driver(self._driver, getattr(self._driver, name), *arguments)
