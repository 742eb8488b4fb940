"""Early pruning: choose how many of its first rows each request keeps after a segment boundary.

At a boundary, the target's intermediate hidden rows, except each request's last, score the draft model's candidates for
the next token (FASER's Top-K signal, arXiv 2604.20503). Rows after a draft that is likely to be rejected are dropped.
The row that verifies this draft stays, so a wrong exit only costs time.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from faser_trtllm.core.decision import PruneRule
from faser_trtllm.core.value import value
from faser_trtllm.ops.arrays import Float32Array, Float64Array, Int32Array

MAX_PLACE = 8  # larger ranks count as this


@value
class PruneBatch:
    """The decoding requests of a pass at a segment boundary."""

    starts: Int32Array  # [num_requests]: each request's first row of the pass
    num_rows: Int32Array  # [num_requests]: 1 + its drafts
    candidates: Int32Array  # [num_drafts, num_candidates]: the draft model's, request by request; -1 for none
    places: Int32Array  # [num_drafts]: the drafted token's place among the candidates
    num_hidden: int  # rows of the pass
    rule: PruneRule


class Boundary(Protocol):
    """The methods of an engine that pruning calls between two segments (engine/base.py)."""

    def early_exit(self, rows: Int32Array, candidates: Int32Array) -> Float32Array: ...

    def compact_rows(self, rows: Int32Array) -> None: ...


class HostPruning:
    """Implements Engine.prune for engines whose scores the host reads."""

    def prune(self: Boundary, batch: PruneBatch) -> Int32Array:
        rows = np.concatenate([np.arange(s, s + n - 1) for s, n in zip(batch.starts, batch.num_rows, strict=True)])
        scores = self.early_exit(rows.astype(np.int32), batch.candidates)
        kept = prune_rows_reference(scores, batch)
        listed = kept_rows(batch, kept)
        if listed.size < batch.num_hidden:
            self.compact_rows(listed)
        return kept


def prune_rows_reference(scores: Float32Array, batch: PruneBatch) -> Int32Array:
    """Return how many rows each request keeps, int32 [num_requests], 1 to num_rows[i].

    scores [num_drafts, num_candidates]. A draft's rank and gap among its candidates and the estimate from before the
    pass give its new acceptance probability. A row stays while the product of these probabilities up to its draft is at
    least the rule's limit. Sums and products are in float64, in the kernel's order.
    """
    rule = batch.rule
    rank, gap = rank_and_gap(scores, batch.places)
    if rule.record is not None:
        rule.record(rank, gap)
    rank_weight, gap_weight, survival, intercept, least = rule.weights().astype(np.float64)
    logit = rank_weight * np.minimum(rank, MAX_PLACE) + gap_weight * gap.astype(np.float64)
    logit += intercept + survival * rule.before.astype(np.float64)
    estimate = sigmoids(logit)
    num_drafts = batch.num_rows - 1
    first = np.cumsum(num_drafts) - num_drafts
    kept = np.ones(batch.num_rows.size, np.int32)
    survival, going = np.ones(batch.num_rows.size), np.arange(batch.num_rows.size)
    for place in range(int(num_drafts.max(initial=0))):
        going = going[num_drafts[going] > place]
        survival[going] *= estimate[first[going] + place]
        going = going[survival[going] >= least]
        kept[going] += 1
    return kept


def kept_rows(batch: PruneBatch, kept: Int32Array) -> Int32Array:
    """Return the indices of the pass's rows that stay, int32, ascending."""
    stays = np.ones(batch.num_hidden, bool)
    counts = batch.num_rows - kept
    firsts = batch.starts + kept - (np.cumsum(counts) - counts)
    stays[np.repeat(firsts, counts) + np.arange(counts.sum())] = False
    return np.flatnonzero(stays).astype(np.int32)


def rank_and_gap(scores: Float32Array, places: Int32Array) -> tuple[Int32Array, Float32Array]:
    """Return rank int32 [num_drafts], how many candidates are better than the drafted one, and gap fp32 [num_drafts].

    scores [num_drafts, num_candidates]; places [num_drafts]: the drafted token's place among the candidates. The gap,
    >= 0, is the best score minus the drafted token's.
    """
    drafted = scores[np.arange(scores.shape[0]), places]
    rank = (scores > drafted[:, None]).sum(1, dtype=np.int32)
    gap = np.where(rank > 0, scores.max(1, initial=-np.inf) - np.where(rank > 0, drafted, 0), 0).astype(np.float32)
    return rank, gap


def sigmoids(z: Float64Array) -> Float64Array:
    e = np.exp(-np.abs(z))
    found: Float64Array = np.where(z >= 0, 1.0, e) / (1.0 + e)
    return found
