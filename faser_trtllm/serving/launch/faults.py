"""Injects faults into the engines if FASER_FAULT asks for it; lab/faults.py of a checkout implements them."""

from __future__ import annotations

import os
from collections.abc import Callable

from faser_trtllm.checkout import import_from_checkout
from faser_trtllm.engine.base import Engine

VARIABLE = "FASER_FAULT"


def fault_wrapper() -> Callable[[Engine, str], Engine]:
    """Return (engine, role) -> engine, which adds the faults of FASER_FAULT; raise FaserError if that cannot work."""
    spec = os.environ.get(VARIABLE, "").strip()
    if not spec:
        return lambda engine, role: engine
    faults = import_from_checkout("lab.faults", VARIABLE)
    parsed = faults.parse_faults(spec)
    return lambda engine, role: faults.with_faults(engine, role, parsed)
