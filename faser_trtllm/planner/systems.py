"""The systems that a plan compares: a policy, and what drafts."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError

OFF, PRICE, EAGLE3 = "off", "price", "EAGLE-3 head, price"
FIXED = (1, 2, 3, 5)


@dataclass(frozen=True)
class System:
    """speculation: the policy's spelling in faser.yaml. drafts: whether there is a draft model."""

    label: str
    speculation: str
    is_eagle3: bool = False

    @property
    def drafts(self) -> bool:
        return self.label != OFF


SYSTEMS = {
    system.label: system
    for system in (
        System(OFF, "off"),
        *(System(f"fixed:{k}", f"fixed:{k}") for k in FIXED),
        System("schedule", "schedule"),
        System(PRICE, "price:mode=serial,prune=off"),
        System("price+pruning", "price:mode=serial,prune=auto"),
        System("price+overlap", "price:mode=auto,prune=off"),
        System(EAGLE3, "price:mode=serial,prune=off", is_eagle3=True),
    )
}
PREFERENCE = (OFF, PRICE, "price+pruning", "price+overlap", "schedule", *(f"fixed:{k}" for k in FIXED))
"""Which of equals is recommended: the simplest, then what learns. An EAGLE-3 head is none that this project runs."""


def parse_systems(text: str | None) -> tuple[str, ...]:
    """Labels with semicolons; None: all. `off` is always there, to compare with."""
    labels = list(SYSTEMS) if text is None else [label.strip() for label in text.split(";")]
    for label in labels:
        if label not in SYSTEMS:
            raise InvalidArgumentError(f"system is {label!r}, there are {'; '.join(SYSTEMS)}")
    return tuple(dict.fromkeys([OFF, *labels]))
