"""Random schedules of a target on emulated kernels: each text and all of its logits as without speculation, alone.

    python -m tests.engine.cuda.schedules --count 10000 --seed 1

A schedule is some requests of a pool that arrive at random steps. Its executor has random limits; the policy drafts,
verifies, prunes, branches and overlaps at random.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.config import DrafterName, ExecutorConfig, KvCacheConfig, KvCacheDtype, SchedulerConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cuda.open import open_cuda_engines
from faser_trtllm.engine.opening import OpenRequest
from faser_trtllm.executor.factory import assemble
from faser_trtllm.policy.static import OffPolicy
from lab.clock import ManualClock
from tests.engine.cuda.harness import build_moe_pair, build_pair
from tests.engine.cuda.kernel_rows import KernelRowsGpu
from tests.support.doubtful import doubtful_drafts
from tests.support.executor_harness import Collector, ErraticPolicy

MAX_SEQ_LEN, MAX_DRAFT_LEN, TOKENS_PER_BLOCK = 96, 4, 16


@dataclass(frozen=True)
class Setting:
    """The limits of an executor; all but the type of its caches must not change a bit."""

    policy_seed: int | None = None  # None: no speculation
    max_batch_size: int = 1
    max_num_tokens: int = 64
    max_seq_len: int = MAX_SEQ_LEN
    num_blocks: int = 6
    capacity: str = "GUARANTEED_NO_EVICT"
    reuse: bool = False
    chunk_unit_size: int = 16
    drafters: tuple[str, ...] = ("model",)
    num_branches: int = 0
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO

    @classmethod
    def random(cls, chance: random.Random, kv_dtype: KvCacheDtype, max_seq_len: int) -> Setting:
        of_one = max_seq_len // TOKENS_PER_BLOCK
        drafters = chance.choice((("model",), ("suffix",), ("suffix", "model")))
        return cls(
            policy_seed=chance.randrange(10**6),
            max_batch_size=chance.choice((2, 3, 5)),
            max_num_tokens=chance.choice((6, 11, 24, 64)),
            max_seq_len=max_seq_len,
            num_blocks=chance.choice((of_one, of_one + 1, 3 * of_one)),
            capacity=chance.choice(("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")),
            reuse=chance.choice((True, False)),
            chunk_unit_size=chance.choice((1, 2, 16)),
            drafters=drafters,
            num_branches=chance.choice((0, 0, 2)) if "model" in drafters else 0,
            kv_dtype=kv_dtype,
        )


@contextmanager
def opened(engines, setting, deterministic=True):
    """An executor over KernelRowsGpu."""
    is_off = setting.policy_seed is None
    drafters = tuple(map(DrafterName, setting.drafters))
    max_draft_len = 0 if is_off else MAX_DRAFT_LEN
    sizes = (setting.max_batch_size, setting.max_num_tokens, setting.max_seq_len, max_draft_len, TOKENS_PER_BLOCK)
    request = OpenRequest(
        engines,
        BuildConfig(*sizes),
        setting.num_blocks,
        drafting=not is_off and DrafterName.MODEL in drafters,
        kv_dtype=setting.kv_dtype,
        num_branches=setting.num_branches,
        deterministic=deterministic,
    )
    with ExitStack() as stack, doubtful_drafts():
        found = open_cuda_engines(request, KernelRowsGpu(), stack)
        executor = assemble(
            found.target,
            found.draft,
            OffPolicy() if is_off else ErraticPolicy(MAX_DRAFT_LEN, setting.policy_seed),
            ExecutorConfig(
                drafters=drafters,
                num_branches=setting.num_branches,
                kv_cache_config=KvCacheConfig(enable_block_reuse=setting.reuse),
                scheduler_config=SchedulerConfig(
                    capacity_scheduler_policy=setting.capacity, chunk_unit_size=setting.chunk_unit_size
                ),
            ),
            max_seq_len=setting.max_seq_len,
            max_draft_len=max_draft_len,
            clock=ManualClock(),
            resources=stack.pop_all(),
            enter_mode=found.enter_mode,
            sampler=found.sampler,
            copy_kv=found.copy_kv,
        )
        with executor:
            yield executor


def run(executor, requests, arrivals):
    """Return each request's tokens, and the bits of their logits."""
    collector, step = Collector(), 0
    waiting = sorted(zip(arrivals, range(len(requests)), strict=True))
    while executor.step() or waiting:
        while waiting and waiting[0][0] <= step:
            index = waiting.pop(0)[1]
            executor.submit(str(index), *requests[index], collector.sink(str(index)))
        step += 1
        assert step < 10_000
    found = [(collector.tokens[str(i)], collector.requests[str(i)].output_logits) for i in range(len(requests))]
    return [(tokens, [row.tobytes() for row in rows]) for tokens, rows in found]


def make_requests(chance: random.Random, count: int, vocab_size: int, stem_lens=(20, 60)):
    """Greedy and seeded in turn; some repeat themselves, and some begin alike, over the end of a block."""
    stems = [[chance.randrange(vocab_size) for _ in range(length)] for length in stem_lens]
    requests, weights = [], (8, 4, 2, 1, 1)[: 2 + len(stems)]
    for number in range(count):
        prompt = [chance.randrange(vocab_size) for _ in range(chance.choice((1, 2, 3, 5)))]
        prompt = chance.choices((prompt, (prompt * 5)[:9], *(stem + prompt for stem in stems)), weights)[0]
        drawn = {"temperature": 0.7, "seed": number} if number % 2 else {"temperature": 0.0}
        edits = {"repetition_penalty": 1.2} if number % 5 == 4 else {}
        length = chance.choice((1, 2, 4, 4, 12))
        params = SamplingParams(max_tokens=length, end_ids=(2,), return_generation_logits=True, **drawn, **edits)
        requests.append((prompt, params))
    return requests


class Schedules:
    """Runs random schedules over the engines; totals: the executors' statistics."""

    def __init__(self, engines, seed: int, num_texts: int = 40, stem_lens=(20, 60)) -> None:
        self._engines, self._max_seq_len = engines, engines.build_config.max_seq_len
        self._chance = random.Random(seed)
        self._requests = make_requests(self._chance, num_texts, engines.vocab_size, stem_lens)
        self._wanted: dict[KvCacheDtype, list] = {}
        self.totals: Counter[str] = Counter()

    def wanted(self, kv_dtype: KvCacheDtype):
        """The texts of all requests, each alone, without speculation, with its prompt in one pass."""
        if kv_dtype not in self._wanted:
            with opened(self._engines, self._alone(kv_dtype)) as executor:
                self._wanted[kv_dtype] = [run(executor, [request], [0])[0] for request in self._requests]
        return self._wanted[kv_dtype]

    def _alone(self, kv_dtype: KvCacheDtype) -> Setting:
        return Setting(
            kv_dtype=kv_dtype, max_seq_len=self._max_seq_len, num_blocks=self._max_seq_len // TOKENS_PER_BLOCK
        )

    def run(self, count: int, each: int = 25, prompt_len: int = 0) -> None:
        """Run this many schedules, up to `each` of them in an executor of one setting. A request of each has a prompt
        of at least prompt_len tokens."""
        chance = self._chance
        numbers = range(len(self._requests))
        long = [number for number in numbers if len(self._requests[number][0]) >= prompt_len]
        while count:
            kv_dtype = chance.choice((KvCacheDtype.AUTO, KvCacheDtype.AUTO, KvCacheDtype.FP8))
            setting = Setting.random(chance, kv_dtype, self._max_seq_len)
            wanted = self.wanted(setting.kv_dtype)
            with opened(self._engines, setting) as executor:
                for _ in range(min(count, each)):
                    chosen = [chance.choice(long), *chance.choices(numbers, k=chance.randint(0, 3))]
                    arrivals = [chance.choice((0, 0, 1, 3)) for _ in chosen]
                    found = run(executor, [self._requests[number] for number in chosen], arrivals)
                    for number, text in zip(chosen, found, strict=True):
                        assert text == wanted[number], f"{setting}, request {number}"
                    count -= 1
                executor.check_integrity()
                self.totals.update({name: value for name, value in executor.stats().items() if name.startswith("num_")})


def build(directory: Path, dtype: str = "bfloat16", max_seq_len: int = MAX_SEQ_LEN):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 64}
    sizes |= {"max_seq_len": max_seq_len, "max_position_embeddings": max_seq_len}
    return build_pair(directory, dtype, exit_layers=(1,), **sizes)


def build_mixture(directory: Path, family: str):
    sizes = {"num_layers": 2, "hidden_size": 32, "expert_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    sizes |= {"vocab_size": 64, "max_position_embeddings": MAX_SEQ_LEN}
    return build_moe_pair(directory, family, exit_layers=(1,), max_seq_len=MAX_SEQ_LEN, **sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", help="of a mixture of experts; default: a dense model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        engines = build_mixture(path, options.family) if options.family else build(path)
        schedules, begun = Schedules(engines, options.seed), time.monotonic()
        for done in range(0, options.count, 100):
            schedules.run(min(100, options.count - done))
            print(f"{done + min(100, options.count - done)} schedules, {time.monotonic() - begun:.0f} s", flush=True)
        print({name: value for name, value in sorted(schedules.totals.items()) if value})


if __name__ == "__main__":
    main()
