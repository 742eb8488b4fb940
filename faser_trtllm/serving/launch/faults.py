"""Deliberate faults of the engines, which FASER_FAULT asks for in a checkout (lab/faults.py)."""

from __future__ import annotations

import os
from collections.abc import Callable

from faser_trtllm.checkout import import_from_checkout
from faser_trtllm.engine.base import Engine

VARIABLE = "FASER_FAULT"


def fault_wrapper() -> Callable[[Engine, str], Engine]:
    """Return what wraps the engine of a role; raise FaserError for a wrong FASER_FAULT, or one without a checkout."""
    spec = os.environ.get(VARIABLE, "").strip()
    if not spec:
        return lambda engine, role: engine
    faults = import_from_checkout("lab.faults", VARIABLE)
    parsed = faults.parse_faults(spec)
    return lambda engine, role: faults.with_faults(engine, role, parsed)
