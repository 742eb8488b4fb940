"""The policy that an executor gets for a spelling and an engine directory."""

from collections.abc import Collection
from pathlib import Path

from faser_trtllm.config import DrafterName
from faser_trtllm.executor.settings import choose_costs, policy_of
from faser_trtllm.policy.base import Policy


def choose_policy(
    engine_dir: Path,
    speculation: str,
    num_threads: int,
    max_draft_len: int,
    max_batch_size: int,
    drafters: Collection[DrafterName] = (DrafterName.MODEL,),
) -> Policy:
    costs = choose_costs(engine_dir, speculation, num_threads)
    return policy_of(speculation, max_draft_len, max_batch_size, costs, drafters)
