"""The systems that a plan compares: a policy, and what drafts."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError

OFF, PRICE, EAGLE3, BLOCK = "off", "price", "EAGLE-3 head, price", "block drafter, price"
DRAFT_MODEL = "draft"
FIXED = (1, 2, 3, 5)


@dataclass(frozen=True)
class System:
    """speculation: the policy's spelling in faser.yaml. drafter: OFF, DRAFT_MODEL, "eagle3" or "block"; the last two
    are the target's."""

    label: str
    speculation: str
    drafter: str = DRAFT_MODEL

    @property
    def is_head(self) -> bool:
        """It drafts from the target's hidden rows."""
        return self.drafter not in (OFF, DRAFT_MODEL)


SYSTEMS = {
    system.label: system
    for system in (
        System(OFF, "off", OFF),
        *(System(f"fixed:{k}", f"fixed:{k}") for k in FIXED),
        System("schedule", "schedule"),
        System(PRICE, "price:mode=serial,prune=off"),
        System("price+pruning", "price:mode=serial,prune=auto"),
        System("price+overlap", "price:mode=auto,prune=off"),
        System(EAGLE3, "price:mode=serial,prune=off", "eagle3"),
        System(BLOCK, "price:mode=serial,prune=off", "block"),
    )
}
PREFERENCE = (OFF, PRICE, "price+pruning", "price+overlap", "schedule", *(f"fixed:{k}" for k in FIXED))
"""Which of equals is recommended: the simplest, then what learns. Heads and block drafters are not, since a target has
to have one."""


def parse_systems(text: str | None) -> tuple[str, ...]:
    """Labels with semicolons; None: all. `off` is always there, to compare with."""
    labels = list(SYSTEMS) if text is None else [label.strip() for label in text.split(";")]
    for label in labels:
        if label not in SYSTEMS:
            raise InvalidArgumentError(f"system is {label!r}, there are {'; '.join(SYSTEMS)}")
    return tuple(dict.fromkeys([OFF, *labels]))
