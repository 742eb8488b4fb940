"""The counters of the virtual GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.virtual_gpu.device.library import driver


@dataclass(frozen=True)
class Counters:
    """work: items run, by context ("whole", or first SM + number of SMs) and label. graphs: launches by context. waits:
    of the host, by label. copies: by direction and label, (count, bytes). Labels of waits and copies end with the
    function that asked: "wait engine/gpu/sampler/accept:sample". Bytes in use: of the device and of page-locked
    memory."""

    work: dict[str, dict[str, int]]
    graphs: dict[str, int]
    waits: dict[str, int]
    copies: dict[str, dict[str, tuple[int, int]]]
    device_bytes: int
    host_bytes: int

    @classmethod
    def now(cls) -> Counters:
        return cls.parse(driver().counters())

    @classmethod
    def parse(cls, text: str) -> Counters:
        found = json.loads(text)
        for copies in found["copies"].values():
            copies.update({label: (each["count"], each["bytes"]) for label, each in copies.items()})
        return cls(**found)

    def since(self, before: Counters) -> Counters:
        """Return what was counted after `before`; bytes in use are the current ones."""
        return Counters(
            _minus(self.work, before.work),
            _minus(self.graphs, before.graphs),
            _minus(self.waits, before.waits),
            _minus(self.copies, before.copies),
            self.device_bytes,
            self.host_bytes,
        )

    def reads(self) -> dict[str, tuple[int, int]]:
        """Copies to the host (count, bytes), by the function that asked."""
        return {label.removeprefix("to host "): found for label, found in self.copies.get("DtoH", {}).items()}

    def kernels(self, context: str) -> dict[str, int]:
        """Launches that ran there, by kernel."""
        items = self.work.get(context, {}).items()
        return {label.removeprefix("kernel "): count for label, count in items if label.startswith("kernel ")}


def _minus(now: Any, before: Any) -> Any:
    """Return the difference of nested dicts, without what did not change."""
    if isinstance(now, int):
        return now - (before or 0)
    if isinstance(now, tuple):
        return tuple(_minus(a, b) for a, b in zip(now, before or (0,) * len(now), strict=True))
    changes = {name: _minus(value, (before or {}).get(name)) for name, value in now.items()}
    return {name: change for name, change in changes.items() if change and (isinstance(change, int) or any(change))}
