"""Online, calibrated estimate of the probability that a draft is accepted.

Place j of the pending drafts of requests with sampling mode s has p = sigmoid(slope[s, j] * margin + intercept[s, j]),
margin being how much of its logit the draft's choice could do without (Request.draft_margins); a request adds a
log-odds offset of its own. Where little was seen, the fit of all places, and then of all modes, stands in. Only tested
drafts are observations (right censoring: behind the first rejection, and behind the frontier, nothing is known). Fitted
by damped Newton steps on sufficient statistics that are forgotten exponentially, as vLLM's adaptive verification does
it (acceptance_estimator.py), which is recursive iteratively reweighted least squares. Everything learnt comes from
tested, hence settled, tokens: an estimate for a pending draft depends on its own prefix only, which the exactness rule
asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.frontier import MAX_MARGIN
from faser_trtllm.policy.base import StepOutcome

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]

INITIAL_INTERCEPT = 1.5  # p = 0.82 before anything is known (vLLM's value)
RIDGE = 1e-3
MIN_OBSERVATIONS = 50  # fewer: a pooled fit stands in
FLUSH_STEPS = 16  # steps after which requests' offsets are learnt (half as many until the population is), or
FLUSH_OBSERVATIONS = 768  # tested drafts
REFIT_FLUSHES = 4  # flushes after which the population is fitted, or
REFIT_OBSERVATIONS = 3072  # tested drafts
EARLY_REFITS = 6  # the first ones come with every flush
SETTLED = 1000  # tested drafts after which
SETTLED_FLUSHES = 12  # is often enough
MEMORY = 1500.0  # observations of a place after which old ones weigh 1 / e
MAX_STEP = 1.0  # of slope and of intercept, per refit
INITIAL_WEIGHT = 8.0  # pseudo-observations of the initial rate in that of everything
PRIOR_WEIGHT = 40.0  # pseudo-observations of the pooled rate in a place's or mode's rate: those of a request are alike
RATE_MEMORY = 400.0  # observations, for the rates by place
FADING = 6400.0  # observations of whatever place and mode, after which an unlucky one that is not drafted is forgotten
OFFSET_PRECISION = 6.0  # of a request's log-odds offset: standard deviation 0.4 over requests
OFFSET_MEMORY = 0.85  # per flush
MAX_OFFSET = 2.0
NUM_BINS = 20


@dataclass(frozen=True)
class Reliability:
    """Bins of equal width over [0, 1]: mean prediction, observed rate (nan where empty) and count of each."""

    predicted: FloatArray
    observed: FloatArray
    count: FloatArray

    @property
    def ece(self) -> float:
        """Expected calibration error: mean distance of prediction and rate, weighted by the counts."""
        total = self.count.sum()
        if total == 0:
            return 0.0
        filled = self.count > 0
        gaps = np.abs(self.predicted[filled] - self.observed[filled])
        return float((gaps * self.count[filled]).sum() / total)


def reliability(predicted: npt.ArrayLike, accepted: npt.ArrayLike, num_bins: int = 10) -> Reliability:
    """The reliability diagram of predictions [n] in [0, 1] and outcomes [n] in {0, 1}."""
    p = np.asarray(predicted, np.float64)
    bins = np.minimum((p * num_bins).astype(np.int64), num_bins - 1)
    weights = (np.ones_like(p), p, np.asarray(accepted, np.float64))
    count, sum_p, sum_y = (np.bincount(bins, w, minlength=num_bins).astype(np.float64) for w in weights)
    return _diagram(count, sum_p, sum_y)


class SurvivalEstimator:
    """One per policy. slope, intercept, prior: float32 [NUM_MODES, max_draft_len]; prior[s, j] is the rate of requests
    with sampling mode s at place j, margins aside, and prior_logit (float64) its log-odds.

    The arrays are replaced at a refit, never written in place; version counts the refits.
    """

    def __init__(self, max_draft_len: int, max_batch_size: int) -> None:
        k = max(1, max_draft_len)
        self._k = k
        self._cells = NUM_MODES + 1, k + 1  # a fit each: the last row is of all modes, the last column of all places
        size = self._cells[0] * self._cells[1]
        self._theta = np.zeros((size, 2))  # slope, intercept
        self._theta[:, 1] = INITIAL_INTERCEPT
        self._info = np.zeros((size, 2, 2))  # discounted information matrix
        self._tested = np.zeros(size)  # discounted counts for the rates
        self._accepted = np.zeros(size)
        self._num_seen = np.zeros(size)
        self._offset = np.zeros(max_batch_size)  # by slot
        self._offset_info = np.zeros(max_batch_size)
        self._owner: list[str | None] = [None] * max_batch_size
        self._mode = np.zeros(max_batch_size, np.int64)
        self._margins: list[float] = []  # of tested drafts; then by request: slot, mode, tested, accepted
        self._slots: list[int] = []
        self._modes: list[int] = []
        self._tests: list[int] = []
        self._wins: list[int] = []
        self._steps = 0
        self._kept: list[tuple[npt.NDArray[np.int64], FloatArray, FloatArray, FloatArray]] = []
        self._num_kept = 0
        self._num_flushes = 0
        self._bins = np.zeros((3, NUM_BINS))
        self.num_updates = 0  # of requests' offsets; version counts those of the population's fit
        self.version = 0
        self._publish()

    slope: Float32Array
    intercept: Float32Array
    prior: Float32Array
    prior_logit: FloatArray

    @property
    def is_new(self) -> bool:
        """Whether so little was seen that nothing should rest on it."""
        return self.version <= EARLY_REFITS

    @property
    def is_settled(self) -> bool:
        """Whether so much was seen that not every step need be observed."""
        return bool(self._num_seen[-1] >= SETTLED)

    def offset(self, request: Request) -> float:
        """The request's log-odds offset; 0 for a new one."""
        slot = request.slot
        return float(self._offset[slot]) if slot >= 0 and self._owner[slot] == request.request_id else 0.0

    def offsets(self, requests: list[Request]) -> FloatArray:
        owner, offset = self._owner, self._offset.tolist()
        return np.array([offset[r.slot] if owner[r.slot] == r.request_id else 0.0 for r in requests])

    def survival(self, request: Request, num_pending: int) -> list[float]:
        """Survival of the request's first num_pending drafts, non-increasing."""
        first = request.num_tokens
        margins = request.draft_margins[first : first + num_pending].tolist()
        offset, mode = self.offset(request), request.sampling_mode
        out: list[float] = []
        alive, exp = 1.0, math.exp
        for margin, slope, intercept in zip(margins, self._slope_list[mode], self._intercept_list[mode], strict=False):
            x = slope * (margin if margin < MAX_MARGIN else MAX_MARGIN) + intercept + offset
            alive = alive / (1.0 + exp(-x)) if x > -40.0 else 0.0
            out.append(alive)
        return out

    def population(self) -> list[float]:
        """Survival by place before drafting, of whatever requests there are."""
        return self._survival_list

    def expected(self, request: Request, num_places: int | None = None) -> list[float]:
        """Survival by place before drafting, from the rates and the request's offset; of all places, or the first."""
        offset, alive, exp, out = self.offset(request), 1.0, math.exp, []
        for logit in self._prior_logit_list[request.sampling_mode][:num_places]:
            alive /= 1.0 + exp(-logit - offset)  # log-odds are within 7 of 0, offsets within MAX_OFFSET
            out.append(alive)
        return out

    def expected_many(self, requests: list[Request]) -> FloatArray:
        """expected() of many -> [num_requests, max_draft_len]."""
        modes = [request.sampling_mode for request in requests]
        p = 1.0 / (1.0 + np.exp(-(self.offsets(requests)[:, None] + self.prior_logit[modes])))
        return np.cumprod(p, axis=1, out=p)

    def observe(self, outcome: StepOutcome) -> None:
        """Take in the drafts that the step tested; learn now and then."""
        for request, tested, accepted in zip(outcome.decoding, outcome.num_tested, outcome.num_accepted, strict=True):
            if tested and request.slot >= 0:
                first = request.num_tokens
                self._margins += request.draft_margins[first : first + tested].tolist()
                self._slots.append(request.slot)
                self._modes.append(request.sampling_mode)
                self._tests.append(tested)
                self._wins.append(accepted)
                if self._owner[request.slot] != request.request_id:
                    self._owner[request.slot] = request.request_id
                    self._mode[request.slot] = request.sampling_mode
                    self._offset[request.slot] = self._offset_info[request.slot] = 0.0
        self._steps += 1
        num_steps = FLUSH_STEPS // 2 if self.is_new else FLUSH_STEPS
        if self._steps >= num_steps or len(self._margins) >= FLUSH_OBSERVATIONS:
            self._steps = 0
            if self._margins:
                self._flush()

    def reliability(self) -> Reliability:
        """Of the predictions made before each outcome was known, since the start (NUM_BINS bins)."""
        return _diagram(*self._bins)

    def _flush(self) -> None:
        """Offsets of the requests seen, then, when it is due, the population's fit."""
        tests = np.array(self._tests)
        slots = np.repeat(np.array(self._slots), tests)
        modes = np.repeat(np.array(self._modes), tests)
        starts = np.repeat(np.cumsum(tests) - tests, tests)
        places = np.arange(starts.size) - starts
        won = (places < np.repeat(np.array(self._wins), tests)).astype(np.float64)
        margins = np.minimum(np.array(self._margins), MAX_MARGIN)
        for buffer in (self._margins, self._slots, self._modes, self._tests, self._wins):
            buffer.clear()
        logits = margins * self.slope[modes, places] + self.intercept[modes, places]
        p = 1.0 / (1.0 + np.exp(-(logits + self._offset[slots])))
        self._learn_offsets(slots, won - p, p * (1.0 - p))
        self._kept.append((modes * self._cells[1] + places, margins, won, p))
        self._num_kept += places.size
        self._num_flushes += 1
        due = 1 if self.is_new else SETTLED_FLUSHES if self.is_settled else REFIT_FLUSHES
        if self._num_flushes >= due or self._num_kept >= REFIT_OBSERVATIONS:
            self._refit()

    def _learn_offsets(self, slots: npt.NDArray[np.int64], error: FloatArray, weight: FloatArray) -> None:
        """One Newton step of penalised log-odds offsets; the penalty shrinks them towards the population's 0."""
        size = self._offset.size
        gradient = np.bincount(slots, error, minlength=size)
        info = np.bincount(slots, weight, minlength=size)
        seen = info > 0.0
        known = OFFSET_MEMORY * self._offset_info + info
        fade = (1.0 - OFFSET_MEMORY) * OFFSET_PRECISION * self._offset
        moved = np.clip(self._offset + (gradient - fade) / (known + OFFSET_PRECISION), -MAX_OFFSET, MAX_OFFSET)
        self._offset_info = np.where(seen, known, self._offset_info)
        self._offset = np.where(seen, moved, self._offset)
        self.num_updates += 1

    def _refit(self) -> None:
        cells, margins, won, predicted = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
        self._kept.clear()
        self._num_kept = self._num_flushes = 0
        bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for row, weights in zip(self._bins, (None, predicted, won), strict=True):
            row += np.bincount(bins, weights, minlength=NUM_BINS)
        last_row, last_column = NUM_MODES * self._cells[1], self._k
        places = cells % self._cells[1]
        pooled = cells - places + last_column, last_row + places, np.full_like(cells, last_row + last_column)
        self._newton(np.concatenate([cells, *pooled]), np.tile(margins, 4), np.tile(won, 4))
        self._publish()
        self._centre()

    def _centre(self) -> None:
        """Offsets are about the requests' mean: what they share is the population's, which the fit has taken in.

        Otherwise a single request's bad luck would count twice. The population is that of the request's mode.
        """
        info, modes = self._offset_info, self._mode
        total = np.bincount(modes, info, minlength=NUM_MODES)
        mean = np.bincount(modes, info * self._offset, minlength=NUM_MODES) / np.maximum(total, 1e-12)
        self._offset = self._offset - mean[modes] * info / (info + OFFSET_PRECISION)

    def _newton(self, cells: npt.NDArray[np.int64], margins: FloatArray, won: FloatArray) -> None:
        """One damped step per cell that has news."""
        size = len(self._theta)
        # Offsets are left out: the population's fit is that of a request with none.
        theta = self._theta[cells]
        p = 1.0 / (1.0 + np.exp(-(theta[:, 0] * margins + theta[:, 1])))
        weight = p * (1.0 - p)
        error = won - p

        def total(values: FloatArray | None) -> FloatArray:
            return np.bincount(cells, values, minlength=size).astype(np.float64)

        n = total(None)
        fade = np.exp(-n / MEMORY)
        self._info *= fade[:, None, None]
        cross = total(weight * margins)
        self._info[:, 0, 0] += total(weight * margins * margins)
        self._info[:, 0, 1] += cross
        self._info[:, 1, 0] += cross
        self._info[:, 1, 1] += total(weight)
        gradient = np.stack([total(error * margins), total(error)], axis=1)
        news = n > 0
        step = np.linalg.solve(self._info + RIDGE * np.eye(2), gradient[:, :, None])[:, :, 0]
        self._theta[news] += np.clip(step, -MAX_STEP, MAX_STEP)[news]
        np.maximum(self._theta[:, 0], 0.0, out=self._theta[:, 0])
        rate_fade = np.exp(-n / RATE_MEMORY - n[-1] / FADING)
        self._tested = self._tested * rate_fade + n
        self._accepted = self._accepted * rate_fade + total(won)
        self._num_seen += n

    def _publish(self) -> None:
        known = (self._num_seen >= MIN_OBSERVATIONS).reshape(self._cells)[:, :, None]
        theta = self._theta.reshape(*self._cells, 2)
        # A place's own fit, else its mode's, else that of the place in all modes, else that of everything.
        of_all_modes = np.where(known[-1, :-1], theta[-1, :-1], theta[-1, -1])
        of_mode = np.where(known[:-1, -1:], theta[:-1, -1:], of_all_modes)
        found = np.where(known[:-1, :-1], theta[:-1, :-1], of_mode)
        rates = self._rates()
        self.slope = np.ascontiguousarray(found[:, :, 0], np.float32)
        self.intercept = np.ascontiguousarray(found[:, :, 1], np.float32)
        self.prior = rates[:-1].astype(np.float32)
        self._slope_list: list[list[float]] = found[:, :, 0].tolist()
        self._intercept_list: list[list[float]] = found[:, :, 1].tolist()
        self.prior_logit = np.log(rates[:-1] / (1.0 - rates[:-1]))
        self._prior_logit_list: list[list[float]] = self.prior_logit.tolist()
        self._survival_list: list[float] = np.cumprod(rates[-1]).tolist()
        self.version += 1

    def _rates(self) -> FloatArray:
        """[NUM_MODES + 1, max_draft_len], the last row of all modes: by place, drawn to what is known of more."""
        tested, accepted = self._tested.reshape(self._cells), self._accepted.reshape(self._cells)

        def drawn_to(rate: FloatArray | float, where: tuple[slice | int, slice | int], weight: float) -> FloatArray:
            return np.asarray((accepted[where] + weight * rate) / (tested[where] + weight))

        of_everything = drawn_to(_sigmoid(INITIAL_INTERCEPT), (-1, -1), INITIAL_WEIGHT)
        of_all_modes = drawn_to(of_everything, (-1, slice(-1)), PRIOR_WEIGHT)
        of_each = drawn_to(of_everything, (slice(-1), -1), PRIOR_WEIGHT)
        of_modes = drawn_to(of_each[:, None], (slice(-1), slice(-1)), PRIOR_WEIGHT)
        return np.clip(np.vstack([of_modes, of_all_modes]), 1e-3, 1.0 - 1e-3)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -40.0 else 0.0


def _diagram(count: FloatArray, sum_p: FloatArray, sum_y: FloatArray) -> Reliability:
    with np.errstate(invalid="ignore"):
        return Reliability(sum_p / count, sum_y / count, count)
