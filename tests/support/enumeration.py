"""The distribution of the text by enumeration: the reference of rejection sampling as it is, and only its source of
uniforms replaced, by one that walks through all of them. Rules that bias the text are there too, so that tests can
fail."""

from __future__ import annotations

from unittest import mock

import numpy as np

from faser_trtllm import native
from faser_trtllm.ops.accept import Outcome
from lab.reference import accept
from lab.reference.accept import accept_reference
from lab.reference.probs import next_token_probs_reference
from lab.reference.sample import sample_draft_reference
from tests.support.sampling_slots import Slots
from tests.support.toy_models import CELLS, VOCAB_SIZE, ToyModel

PROMPT = (0, 1)
LENGTH = 3
MAX_DRAFT_LEN = 2


class _NeedUniformError(Exception):
    pass


def observe(run, values):
    """("result", run(uniform)) where the uniforms are these, or ("next", which uniform it asks for after them)."""
    queue = list(values)

    def uniform(key, index, stream):
        if not queue:
            raise _NeedUniformError(index, stream)
        return queue.pop(0)

    try:
        return "result", run(uniform)
    except _NeedUniformError as need:
        return "next", need.args


def enumerate_uniforms(run, num_cells=CELLS):
    """(probability, result) of run(uniform) over all values of the uniforms it asks for, in so many equal cells.

    Values after which run() asks for the same next number, or ends alike, are one branch.
    """

    def walk(chosen, probability):
        branches = {}
        for cell in range(num_cells):
            observed = observe(run, [*chosen, (cell + 0.5) / num_cells])
            branches.setdefault(observed, []).append((cell + 0.5) / num_cells)
        for (kind, value), cells in branches.items():
            weight = probability * len(cells) / num_cells
            if kind == "result":
                yield weight, value
            else:
                yield from walk([*chosen, cells[0]], weight)

    kind, value = observe(run, [])
    if kind == "result":
        yield 1.0, value
    else:
        yield from walk([], 1.0)


class Enumeration:
    """The distribution of the text when frontiers are cut by `rule`; what a state leads to is remembered.

    source: of the drafts, "drawn" from the draft model, "certain" (a function of the tokens before), or "mixed": a
    function of the tokens before says which. A set of tokens: certain behind these. "replaced" is wrong: a drawn draft
    gives way to a certain one for what it is. draft: another draft model.
    """

    def __init__(
        self, rule: str, seed: int, source: str | frozenset[int] = "drawn", draft: ToyModel | None = None
    ) -> None:
        self.rule = rule
        self.source = source
        self.target, self.draft = ToyModel(seed), draft or ToyModel(seed + 1000)
        self.slots = Slots(1, VOCAB_SIZE, MAX_DRAFT_LEN)
        self._probs: dict = {}
        self._drafted: dict = {}
        self._rows: dict = {}
        self.tested: dict = {}

    def probs(self, emitted=(), pending=()):
        """{text of LENGTH tokens: probability} from a state: committed tokens and carried drafts."""
        if len(emitted) >= LENGTH:
            return {emitted[:LENGTH]: 1.0}
        if (emitted, pending) not in self._probs:
            probs: dict = {}
            for drafted, drafts in self._draft_to_full(emitted, pending):
                for tested, (tokens, left) in self._test(emitted, drafts):
                    for text, probability in self.probs(emitted + tokens, left).items():
                        probs[text] = probs.get(text, 0.0) + drafted * tested * probability
            self._probs[emitted, pending] = probs
        return self._probs[emitted, pending]

    def _draft_to_full(self, emitted, pending):
        if len(pending) == MAX_DRAFT_LEN:
            yield 1.0, pending
            return
        for probability, token in self._draft_one(PROMPT + emitted + pending):
            for rest, drafts in self._draft_to_full(emitted, (*pending, token)):
                yield probability * rest, drafts

    def _is_certain(self, known):
        if isinstance(self.source, frozenset):
            return known[-1] in self.source
        return self.source == "certain" or (self.source == "mixed" and (known[-1] + len(known)) % 2 == 0)

    def _draft_one(self, known):
        context = known[-2:]
        if self._is_certain(known):
            return [(1.0, self._certain_token(known))]
        if self.source == "replaced":
            return [(p, (token, self._certain_token(known))[token == 0]) for p, token in self._draw(context)]
        return self._draw(context)

    def _certain_token(self, known):
        """The target's likeliest now and then, or else any."""
        return int(self.target.probs(known).argmax()) if len(known) % 3 else (known[-1] + 1) % VOCAB_SIZE

    def _draw(self, context):
        if context not in self._drafted:

            def run(uniform):
                self.slots.set(0, tokens=context)
                return int(
                    sample_draft_reference(
                        self.slots.array,
                        np.zeros(1, np.int32),
                        self.draft.logits(context)[None],
                        VOCAB_SIZE,
                        np.array([len(context)], np.int32),
                        MAX_DRAFT_LEN,
                        uniform=uniform,
                    )[0]
                )

            self._drafted[context] = list(enumerate_uniforms(run))
        return self._drafted[context]

    def _test(self, emitted, drafts):
        known = PROMPT + emitted
        certain = tuple(self._is_certain((known + drafts)[: len(known) + j]) for j in range(len(drafts)))
        state = (known[-2:], drafts, certain)
        if state not in self.tested:
            with mock.patch.object(accept, "next_token_probs_reference", self._probs_of_row):
                self.tested[state] = list(enumerate_uniforms(lambda uniform: self._one_pass(*state, uniform)))
        return self.tested[state]

    def _probs_of_row(self, sampling, slot, logits, num_tokens, probs):
        """The reference's, once for the same logits: a plain request's hang on nothing else, whatever the uniforms."""
        key = logits.tobytes()
        if key not in self._rows:
            self._rows[key] = next_token_probs_reference(sampling, slot, logits, num_tokens, probs), probs.copy()
        status, probs[:] = self._rows[key]
        return status

    def _one_pass(self, context, drafts, certain, uniform):
        """(tokens committed, drafts still pending) of one pass over the rows that the rule leaves."""
        result = self._accept(context, drafts, certain, uniform)
        num_tokens = int(result.num_tokens[0])
        tokens = tuple(result.token_ids[0, :num_tokens].tolist())
        carried = result.outcome[0] == Outcome.STILL_PENDING and "all dropped" not in self.rule
        left = drafts[num_tokens:] if carried else ()
        if "dropped by value" in self.rule and left and left[-1] == 0:  # as if it were preempted for what is pending
            left = ()
        return tokens, left

    def _accept(self, context, drafts, certain, uniform):
        num_verified, num_pending = self._frontier(context, drafts)
        self.slots.set(0, tokens=context + drafts)
        for j in range(num_pending):
            position = len(context) + j
            self.slots.draft_sources[0, position] = native.BY_SUFFIX if certain[j] else native.BY_MODEL
            self.slots.draft_probs[0, position % MAX_DRAFT_LEN] = self.draft.probs((context + drafts)[:position])
        logits = np.stack([self.target.logits((context + drafts)[: len(context) + j]) for j in range(num_verified + 1)])
        return accept_reference(
            self.slots.array,
            np.zeros(1, np.int32),
            logits,
            VOCAB_SIZE,
            np.array([0, num_verified + 1], np.int32),
            np.array([len(context)], np.int32),
            np.array([num_pending], np.int32),
            MAX_DRAFT_LEN,
            uniform=uniform,
        )

    def _frontier(self, context, drafts):
        """Drafts to verify, and drafts that the test is told of."""
        own = [float(self.draft.probs((context + drafts)[: len(context) + j])[drafts[j]]) for j in range(2)]
        first, both = own[0], own[0] * own[1]
        trimmed = 0 if first <= 0.4 else 1 if both <= 0.3 else 2
        if self.rule in ("trimmed", "trimmed, all dropped"):
            return trimmed, MAX_DRAFT_LEN
        if self.rule.startswith("later value"):  # no row tests the last draft, but whether rows run hangs on it
            return (2 if drafts[-1] == 0 else 0), MAX_DRAFT_LEN
        if self.rule == "surest first":  # an argmax over all that is pending: a stair of two rows
            return (2 if first + both > 0.6 else 0), MAX_DRAFT_LEN
        if self.rule == "1, dropped by value":
            return 1, MAX_DRAFT_LEN
        if self.rule == "0, dropped by value":
            return 0, MAX_DRAFT_LEN
        if self.rule == "own probability, fresh bonus":
            return trimmed, trimmed
        if self.rule.startswith("later token"):
            return (2 if both > 0.3 else 0), MAX_DRAFT_LEN
        return int(self.rule), MAX_DRAFT_LEN
