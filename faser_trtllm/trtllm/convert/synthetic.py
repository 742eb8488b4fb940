"""TensorRT-LLM's environment variable for synthetic acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.errors import ConfigError

FORCED_ACCEPTANCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
Config = TypeVar("Config", bound=ExecutorConfig)


def with_forced_acceptance(config: Config, environment: Mapping[str, str]) -> Config:
    """Return the configuration with synthetic_acceptance from the environment, unless it has its own.

    The variable is the mean number of accepted draft tokens per step, without the target's own token; 0 is off.
    """
    text = environment.get(FORCED_ACCEPTANCE, "").strip()
    if not text or config.synthetic_acceptance is not None:
        return config
    forced = parse_forced(text)
    if forced is None:
        raise ConfigError(
            f"{FORCED_ACCEPTANCE} is {text[:40]!r}; it must be a number of at least 0; correct or unset it"
        )
    return config.model_copy(update={"synthetic_acceptance": forced}) if forced else config


def parse_forced(value: object) -> float | None:
    """Return the variable's value as a number, None if it is not one."""
    if isinstance(value, bool):
        return None
    try:
        forced = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return forced if math.isfinite(forced) and forced >= 0 else None
