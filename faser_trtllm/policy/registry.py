"""The parser of policy spellings ("off", "fixed:4", "price:mode=serial,prune=off")."""

from __future__ import annotations

from collections.abc import Collection

from faser_trtllm.config import DrafterName
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import ConfigError
from faser_trtllm.policy.base import Mode, Policy
from faser_trtllm.policy.free_drafts import FreeDraftsPolicy
from faser_trtllm.policy.gp_lcb import GpLcbPolicy
from faser_trtllm.policy.price import PricePolicy
from faser_trtllm.policy.schedule import SchedulePolicy
from faser_trtllm.policy.static import DraftLenSchedulePolicy, FixedPolicy, OffPolicy

SPELLINGS = "off, fixed:K, schedule, schedule:N=K,..., gp_lcb, price, auto"
OPTIONS = {
    "prune": ("auto", "on", "off"),
    "mode": ("auto", *(mode.value for mode in Mode)),
}


def needs_costs(spelling: str) -> bool:
    """Return True if make_policy requires a cost table for this spelling."""
    return spelling == "schedule" or spelling.partition(":")[0] == "price"


def may_overlap(spelling: str) -> bool:
    """Return True if the policy may draft and verify at once, which it does only if the spelling has such a mode."""
    _, _, modes = spelling.partition("mode=")
    return bool(modes) and modes.partition(",")[0] != Mode.SERIAL.value


def check_spelling(spelling: str, max_draft_len: int) -> None:
    """Raise ConfigError if make_policy would refuse the spelling with any cost table."""
    if needs_costs(spelling):
        _options(spelling, spelling.partition(":")[2], ("prune", "mode"))
        return
    make_policy(spelling, max_draft_len)


def make_policy(
    spelling: str,
    max_draft_len: int,
    costs: CostTable | None = None,
    max_batch_size: int = 1,
    drafters: Collection[DrafterName] = (DrafterName.MODEL,),
) -> Policy:
    """Make a policy from its spelling; max_draft_len and max_batch_size are those of the engines in use.

    fixed:K,mode=M and price:mode=M,prune=P have options; schedule:N=K,... has a length per batch size and needs no
    costs. Raises ConfigError for an unknown spelling, and if a policy needs costs and there are none.
    """
    name, _, argument = spelling.partition(":")
    if name == "off" and not argument:
        return OffPolicy()
    if name == "fixed":
        length, _, rest = argument.partition(",")
        if length.isascii() and length.isdigit():
            return _fixed(spelling, int(length), rest, max_draft_len)
    if name == "gp_lcb" and not argument:
        return GpLcbPolicy(max_draft_len)
    if name == "schedule" and argument:
        return DraftLenSchedulePolicy(spelling, _draft_len_schedule(spelling, argument, max_draft_len))
    if (name == "schedule" and not argument) or name == "price":
        options = _options(spelling, argument, ("prune", "mode"))
        if costs is None:
            raise ConfigError(
                f"speculation is {spelling}, but this engine directory has no cost table; run `faser profile` on it "
                "or use fixed:K"
            )
        if DrafterName.MODEL not in drafters and name == "price":
            return FreeDraftsPolicy(None, max_draft_len, costs)
        if not costs.has("draft_step"):
            raise ConfigError(
                f"speculation is {spelling}, but this engine directory has no draft model to measure; use price or "
                "fixed:K"
            )
        if name == "schedule":
            return SchedulePolicy(max_draft_len, costs)
        policy = PricePolicy(max_draft_len, costs, max_batch_size, **options)
        if DrafterName.SUFFIX in drafters:
            return FreeDraftsPolicy(policy, max_draft_len, costs)
        return policy
    raise _unknown(spelling)


def _unknown(spelling: str) -> ConfigError:
    return ConfigError(
        f"speculation is {spelling!r}, allowed is one of: {SPELLINGS} (K whole numbers, N batch sizes that rise)"
    )


def _draft_len_schedule(spelling: str, text: str, max_draft_len: int) -> dict[int, int]:
    """Parse "1=4,4=2,8=0"."""
    table: dict[int, int] = {}
    for item in text.split(","):
        size, _, length = item.partition("=")
        if not (size.isdecimal() and length.isdecimal() and int(size) > max(table, default=0)):
            raise _unknown(spelling)
        if int(length) > max_draft_len:
            raise ConfigError(
                f"speculation is {spelling}, but the engines were built for max_draft_len {max_draft_len}; use lengths "
                f"up to that, or rebuild with --max_draft_len {int(length)}"
            )
        table[int(size)] = int(length)
    return table


def _fixed(spelling: str, num_draft_tokens: int, rest: str, max_draft_len: int) -> Policy:
    mode = Mode(_options(spelling, rest, ("mode",), exclude=("auto",)).get("mode", Mode.SERIAL.value))
    if num_draft_tokens > max_draft_len:
        raise ConfigError(
            f"speculation is {spelling}, but the engines were built for max_draft_len {max_draft_len}; "
            f"use fixed:{max_draft_len} or less, or rebuild with --max_draft_len {num_draft_tokens}"
        )
    return FixedPolicy(num_draft_tokens, mode) if num_draft_tokens else OffPolicy()


def _options(spelling: str, text: str, names: tuple[str, ...], exclude: tuple[str, ...] = ()) -> dict[str, str]:
    """Parse "mode=serial,prune=off"."""
    found: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in names:
            raise ConfigError(f"speculation is {spelling!r}, its option {name!r} is none of: {', '.join(names)}")
        allowed = [choice for choice in OPTIONS[name] if choice not in exclude]
        if value not in allowed:
            raise ConfigError(
                f"speculation is {spelling!r}, {name} is {value!r} but must be one of: {', '.join(allowed)}"
            )
        found[name] = value
    return found
