"""All fuzz targets by name."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets import checkpoints, engines, frames, parsers, requests, settings

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (checkpoints, engines, settings, frames, requests, parsers)
    for target in module.TARGETS
}
