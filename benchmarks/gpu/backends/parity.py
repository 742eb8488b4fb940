"""Compare a backend's tokens and logits with those of `cuda`, on the same checkpoint and passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agreement import first_difference
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines.exactness import Difference, record_differences, tokens_of
from benchmarks.gpu.models.pair import OpenPair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens
from benchmarks.policies.workload import Job
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.ops.arrays import Float32Array

# As a share of the logits' standard deviation: libraries round activations and KV to bf16 in different places.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Reference:
    """Greedy tokens without speculation and their logits [tokens, vocab_size], by prompt."""

    prompts: tuple[tuple[int, ...], ...]
    token_ids: tuple[tuple[int, ...], ...]
    logits: tuple[Float32Array, ...]


def read_reference(bench: Bench, pair: OpenPair) -> Reference:
    prompts = tuple(tuple(prompt) for prompt in bench_prompts(bench).token_ids)
    token_ids = tokens_of(pair, "off", _jobs(bench, prompts), pair.limits.max_batch_size)
    logits = tuple(row_logits(pair, [*p, *t[:-1]], len(t)) for p, t in zip(prompts, token_ids, strict=True))
    return Reference(prompts, token_ids, logits)


def compare(bench: Bench, pair: OpenPair, reference: Reference) -> None:
    """Record the share of rows with identical bits, the error of the others, and first differences of greedy tokens."""
    found = [
        row_logits(pair, [*prompt, *tokens[:-1]], len(tokens))
        for prompt, tokens in zip(reference.prompts, reference.token_ids, strict=True)
    ]
    _record_rows(bench, pair, np.concatenate(found), np.concatenate(reference.logits))
    token_ids = tokens_of(pair, "off", _jobs(bench, reference.prompts), pair.limits.max_batch_size)
    differences = []
    for request, (got, want) in enumerate(zip(token_ids, reference.token_ids, strict=True)):
        if got != want:
            differences.append(
                _difference(pair, request, got, want, np.stack([found[request], reference.logits[request]]))
            )
    num_same, num_ties = len(token_ids) - len(differences), sum(d.is_tie for d in differences)
    bench.record.value("tokens as cuda", num_same / len(token_ids))
    bench.record.table(
        "Greedy tokens against those of cuda, without speculation",
        ("requests", "identical", "part at a tie", "part without one"),
        [(len(token_ids), num_same, num_ties, len(differences) - num_ties)],
        "A tie: the two tokens' logits differ by less than bf16 and the two backends' sums can part them.",
    )
    record_differences(bench, differences, " from cuda")


def row_logits(pair: OpenPair, tokens: Sequence[int], num_rows: int) -> Float32Array:
    """Return logits [num_rows, vocab_size] after the last tokens, from one pass over all tokens."""
    blocks = -(-pair.limits.max_seq_len // pair.target.spec.tokens_per_block)
    ids = np.array(tokens, np.int32)
    builder = BatchBuilder(np.arange(blocks, dtype=np.int32).reshape(1, blocks))
    builder.add(0, ids, 0, ids.size, num_rows)
    pair.target.run_rows(builder.build())
    return np.array(pair.target.host_logits(num_rows))


def _record_rows(bench: Bench, pair: OpenPair, found: Float32Array, wanted: Float32Array) -> None:
    apart = np.abs(found - wanted).max(axis=1) / wanted.std()
    same_bits = int((found == wanted).all(axis=1).sum())
    same_top = int((found.argmax(axis=1) == wanted.argmax(axis=1)).sum())
    num_far = int((~(apart <= TOLERANCE)).sum())  # counts NaN as far
    rows = [(len(wanted), same_bits, same_top, f"{np.median(apart):.4f}", f"{apart.max():.4f}", num_far)]
    bench.record.table(
        "Logits against those of cuda, by row",
        ("rows", "same bits", "same most probable token", "median distance", "largest", "too far"),
        rows,
        "The same tokens in one pass per request. distance: of the logit that is furthest, in standard deviations of "
        f"all logits; more than {TOLERANCE:g} is too far.",
    )
    bench.record.value("rows too far", num_far)
    if num_far:
        bench.record.error(f"{num_far} of {len(wanted)} rows of {pair.name} have other logits than cuda's")


def _difference(
    pair: OpenPair, request: int, got: Sequence[int], want: Sequence[int], logits: Float32Array
) -> Difference:
    """Return the first difference. logits: of both backends [2, tokens, vocab_size]."""
    where = first_difference([got], [want])
    assert where is not None
    place = where[1]
    seen = logits[:, place, [got[place], want[place]]]
    noise = float(np.abs(seen[0] - seen[1]).max())
    return Difference(pair.name, request, place, float(abs(seen[1][0] - seen[1][1])), noise, float(np.abs(seen).max()))


def _jobs(bench: Bench, prompts: Sequence[Sequence[int]]) -> tuple[Job, ...]:
    params = SamplingParams(max_tokens=max_tokens(bench))
    return tuple(Job(tuple(prompt), params) for prompt in prompts)
