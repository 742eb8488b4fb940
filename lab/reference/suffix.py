"""The reference of plugins/cpu/suffix.cpp, which searches the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    float32_at,
    int8_at,
    int32_at,
)
from faser_trtllm.ops.draft_stop import sigmoid

LENGTHS = (1, 2, 3, 4, 8, 16)  # smallest match length of each class of continuations


INITIAL_RATES = (0.3, 0.6, 0.7, 0.8, 0.87, 0.9)  # prior probability by class that a continuation is right


PREDICTED_RATES = (0.6, 0.85, 0.9, 0.93, 0.95, 0.97)  # the same for continuations from a prediction


INITIAL_TESTS = 8.0  # weight of these priors, in tests


CELL_TESTS = 2000.0  # tests after which old ones weigh 1 / e


OFFSET_PRECISION = 4.0  # prior precision of a request's log-odds offset, whose prior mean is 0


OFFSET_INFO = 40.0  # limit on the information about it, since a text changes


LEAST_SURVIVAL = 0.1  # minimum survival of a draft


MAX_LOG_ODDS = 13.8


BEGIN, END = -2, -3  # tokens of no vocabulary, at the ends of a prediction and before the output


INITIAL_MODEL_RATE, REQUEST_TESTS = 0.82, 8.0  # the draft model's prior rate, and its weight for a request, in tests


MODEL_TESTS = 600.0


@dataclass(slots=True)
class _Cell:
    """Counts of tests and of tests passed, in which old tests decay."""

    tests: float
    passed: float

    def add(self, tests: float, passed: float, memory: float) -> None:
        kept = max(0.0, 1.0 - tests / memory)
        self.tests = kept * self.tests + tests
        self.passed = kept * self.passed + passed

    @property
    def log_odds(self) -> float:
        p = min(max(self.passed / self.tests, 0.001), 0.999)
        return math.log(p / (1.0 - p))


@dataclass(slots=True)
class _Slot:
    prediction: list[int] = field(default_factory=list)  # BEGIN, its tokens, END; or empty
    only_prediction: bool = False
    first: int = 0  # where the searched part of the text begins
    num_seen: int = 0
    offset: float = 0.0
    info: float = 0.0
    before: tuple[int, int] | None = None  # the slot's counts of model drafts when the request began
    model_tested: int = 0
    model_passed: int = 0


@dataclass(slots=True)
class _Match:
    """The longest suffix that occurred before, and the token that followed it most often."""

    length: int  # of the suffix
    token: int
    count: int  # how often the token followed
    total: int  # how often anything followed
    place: int  # where the token followed first


@dataclass
class SuffixReference:
    """SuffixAutomata by brute force in Python; its methods have the same arguments."""

    max_batch_size: int
    max_tokens: int
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _cells: dict[tuple[int, int, int], _Cell] = field(default_factory=dict)
    _model: dict[int, _Cell] = field(default_factory=dict)

    def reset(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def predict(self, slot: int, token_ids: Sequence[int], *, only_prediction: bool = False) -> None:
        self._slots[slot] = _Slot([BEGIN, *token_ids, END], only_prediction)

    def draft(
        self,
        sampling: SamplingArray,
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        num_new_drafts: Int32Array,
        num_model: Int32Array,
    ) -> Int32Array:
        columns = (array.tolist() for array in (slots, num_tokens, num_drafts, num_new_drafts, num_model))
        return np.array([self._draft(sampling, *row) for row in zip(*columns, strict=True)], np.int32)

    def _draft(self, sampling: SamplingArray, at: int, known: int, pending: int, wanted: int, num_model: int) -> int:
        entry, slot = sampling[at], self._slots.setdefault(at, _Slot())
        mode = int(entry["mode"])
        text: list[int] = int32_at(int(entry["tokens"]), known + pending).tolist()
        self._catch_up(slot, mode, text[:known], int(entry["prompt_len"]))
        rival = self._model_rate(slot, entry, mode)
        searched = self._searched(slot, text, int(entry["prompt_len"]))
        num_known = len(searched) - pending
        survival, count = 1.0, 0
        while count < wanted:
            match = longest_match(searched, num_known)
            if match is None or match.token < 0:
                break
            is_predicted = match.place < len(slot.prediction)
            if slot.only_prediction and not is_predicted:
                break
            odds = self._cell(mode, match, is_predicted).log_odds + slot.offset
            survival *= sigmoid(odds)
            if survival < LEAST_SURVIVAL or (pending + count < num_model and sigmoid(odds) < rival):
                break
            source = native.BY_PREDICTION if is_predicted else native.BY_SUFFIX
            _write(entry, known + pending + count, match.token, odds, source)
            searched.append(match.token)
            count += 1
        return count

    @staticmethod
    def _searched(slot: _Slot, text: Sequence[int], prompt_len: int) -> list[int]:
        """Return the searched tokens: the prediction, then the text, with BEGIN before its output too."""
        own = list(text[slot.first :])
        if slot.prediction and slot.first < prompt_len <= len(text):
            own.insert(prompt_len - slot.first, BEGIN)
        return [*slot.prediction, *own]

    def _catch_up(self, slot: _Slot, mode: int, text: Sequence[int], prompt_len: int) -> None:
        if slot.num_seen > len(text):
            slot.first = slot.num_seen = 0
        if len(text) - slot.num_seen > self.max_tokens:
            slot.first = slot.num_seen = len(text) - self.max_tokens
        for t in range(slot.num_seen, len(text)):
            if t >= prompt_len:
                searched = self._searched(slot, text[:t], prompt_len)
                self._score(slot, mode, longest_match(searched, len(searched)), text[t])
            if t - slot.first >= self.max_tokens:
                slot.first = t - self.max_tokens // 2
        slot.num_seen = len(text)

    def _score(self, slot: _Slot, mode: int, match: _Match | None, token: int) -> None:
        if match is None or match.token < 0:
            return
        cell = self._cell(mode, match, match.place < len(slot.prediction))
        y = float(match.token == token)
        p = sigmoid(cell.log_odds + slot.offset)
        slot.info = min(slot.info + p * (1.0 - p), OFFSET_INFO)
        slot.offset += (y - p) / (slot.info + OFFSET_PRECISION)
        cell.add(1.0, y, CELL_TESTS)

    def _cell(self, mode: int, match: _Match, is_predicted: bool) -> _Cell:
        length = sum(match.length >= least for least in LENGTHS) - 1
        support = 3 if is_predicted else 0 if match.total == 1 else 1 if match.count == match.total else 2
        rates = PREDICTED_RATES if is_predicted else INITIAL_RATES
        initial = _Cell(INITIAL_TESTS, INITIAL_TESTS * rates[length])
        return self._cells.setdefault((mode, support, length), initial)

    def _model_rate(self, slot: _Slot, entry: np.void, mode: int) -> float:
        cell = self._model.setdefault(mode, _Cell(INITIAL_TESTS, INITIAL_TESTS * INITIAL_MODEL_RATE))
        counts = int(entry["num_tested"][native.BY_MODEL]), int(entry["num_passed"][native.BY_MODEL])
        slot.before = slot.before or counts
        tested, passed = counts[0] - slot.before[0], counts[1] - slot.before[1]
        if tested > slot.model_tested:
            cell.add(tested - slot.model_tested, passed - slot.model_passed, MODEL_TESTS)
        slot.model_tested, slot.model_passed = tested, passed
        return (passed + REQUEST_TESTS * cell.passed / cell.tests) / (tested + REQUEST_TESTS)


def longest_match(text: Sequence[int], known: int) -> _Match | None:
    """Find the longest suffix of `text` among the first `known` tokens, where a token follows every occurrence."""
    for length in range(min(len(text), known - 1), 0, -1):
        suffix = list(text[len(text) - length :])
        ends = [end for end in range(length, known) if list(text[end - length : end]) == suffix]
        if ends:
            followers = [text[end] for end in ends]
            token = max(reversed(followers), key=followers.count)  # ties: the latest
            return _Match(length, token, followers.count(token), len(followers), ends[followers.index(token)])
    return None


def _write(entry: np.void, position: int, token: int, odds: float, source: int) -> None:
    int32_at(int(entry["tokens"]), position + 1)[position] = token
    int8_at(int(entry["draft_sources"]), position + 1)[position] = source
    margins: Float32Array = float32_at(int(entry["draft_margins"]), position + 1)
    if margins.size:
        margins[position] = min(max(odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)
    candidates = int32_at(int(entry["draft_candidates"]), (position + 1) * NUM_CANDIDATES)
    if candidates.size:
        candidates[position * NUM_CANDIDATES :] = [token] + [-1] * (NUM_CANDIDATES - 1)
