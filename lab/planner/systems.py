"""The systems that a plan compares, each a policy and a drafter."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError

OFF, PRICE, EAGLE3, BLOCK = "off", "price", "EAGLE-3 head, price", "block drafter, price"
DRAFT_MODEL = "draft"
FIXED = (1, 2, 3, 5)


@dataclass(frozen=True)
class System:
    """A system. speculation: a policy of faser.yaml. drafter: OFF, DRAFT_MODEL, or the target's "eagle3" or "block"."""

    label: str
    speculation: str
    drafter: str = DRAFT_MODEL

    @property
    def is_head(self) -> bool:
        """True if it drafts from the target's hidden rows."""
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
"""Order of recommendation among equals. Heads and block drafters are left out, since not every target has one."""


def parse_systems(text: str | None) -> tuple[str, ...]:
    """Parse labels separated by semicolons; None: all. `off` is always added for comparison."""
    labels = list(SYSTEMS) if text is None else [label.strip() for label in text.split(";")]
    for label in labels:
        if label not in SYSTEMS:
            raise InvalidArgumentError(f"system is {label!r}; it must be one of: {'; '.join(SYSTEMS)}")
    return tuple(dict.fromkeys([OFF, *labels]))
