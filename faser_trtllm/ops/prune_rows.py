"""Early pruning's decision: how many of its first rows each request keeps after a segment boundary.

At a boundary every running row but a request's last scores the draft's candidates for the next token with the target's
own intermediate hidden row (FASER's Top-K signal, arXiv 2604.20503). Rows after a draft that is likely to be rejected
are dropped; the row that would test it stays, so a wrong exit costs nothing but time.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from faser_trtllm.core.decision import PruneRule
from faser_trtllm.core.value import value
from faser_trtllm.ops.arrays import Float32Array, Float64Array, Int32Array

MAX_PLACE = 8  # ranks after it count as it


@value
class PruneBatch:
    """The decoding requests of a pass at a segment boundary.

    starts, num_rows [num_requests] int32: each one's first row of the pass, and how many it has, 1 + its drafts.
    candidates [num_drafts, num_candidates] int32: the draft model's, -1 for none; places [num_drafts] int32: of the
    drafted token among them; both of all requests in turn. num_hidden: rows of the pass.
    """

    starts: Int32Array
    num_rows: Int32Array
    candidates: Int32Array
    places: Int32Array
    num_hidden: int
    rule: PruneRule


class Boundary(Protocol):
    """The part of an engine that pruning asks between two segments (engine/base.py)."""

    def early_exit(self, rows: Int32Array, candidates: Int32Array) -> Float32Array: ...

    def compact_rows(self, rows: Int32Array) -> None: ...


class HostPruning:
    """Engine.prune for an engine whose scores are read by the host."""

    def prune(self: Boundary, batch: PruneBatch) -> Int32Array:
        rows = np.concatenate([np.arange(s, s + n - 1) for s, n in zip(batch.starts, batch.num_rows, strict=True)])
        scores = self.early_exit(rows.astype(np.int32), batch.candidates)
        kept = prune_rows_reference(scores, batch)
        listed = kept_rows(batch, kept)
        if listed.size < batch.num_hidden:
            self.compact_rows(listed)
        return kept


def prune_rows_reference(scores: Float32Array, batch: PruneBatch) -> Int32Array:
    """scores [num_drafts, num_candidates] -> rows kept per request [num_requests] int32, 1 to num_rows[i].

    A draft's rank and gap among its candidates and the estimate from before the pass give its acceptance anew; the
    product along the request is the worth of the row after it. Sums and products in float64, in the kernel's order.
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
    """The rows of the pass that stay, ascending."""
    stays = np.ones(batch.num_hidden, bool)
    counts = batch.num_rows - kept
    firsts = batch.starts + kept - (np.cumsum(counts) - counts)
    stays[np.repeat(firsts, counts) + np.arange(counts.sum())] = False
    return np.flatnonzero(stays).astype(np.int32)


def rank_and_gap(scores: Float32Array, places: Int32Array) -> tuple[Int32Array, Float32Array]:
    """The drafted token's standing among its candidates: rank [num_drafts] int32 (0: none is better), gap fp32 >= 0.

    scores [num_drafts, num_candidates]; places [num_drafts]: the drafted token's place among the candidates. The gap is
    the best score minus the drafted token's.
    """
    drafted = scores[np.arange(scores.shape[0]), places]
    rank = (scores > drafted[:, None]).sum(1, dtype=np.int32)
    gap = np.where(rank > 0, scores.max(1, initial=-np.inf) - np.where(rank > 0, drafted, 0), 0).astype(np.float32)
    return rank, gap


def sigmoids(z: Float64Array) -> Float64Array:
    e = np.exp(-np.abs(z))
    found: Float64Array = np.where(z >= 0, 1.0, e) / (1.0 + e)
    return found
