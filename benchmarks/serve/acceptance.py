"""Numbers of accepted drafts, per request in vLLM's form or from counters of the server's /metrics."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_PREFIXES = ("vllm:spec_decode_", "faser_spec_decode_")
_MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Acceptance:
    """Acceptance in num_steps steps with drafts. histogram: steps by number of accepted drafts, {} if unknown."""

    num_steps: int
    num_drafts: int
    num_accepted: int
    histogram: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> float | None:
        """Mean tokens per step, the target's own included; None without a step."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def rate(self) -> float | None:
        """Accepted over drafted tokens; None without drafts."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def by_position(self) -> list[float]:
        """Share of the steps that accepted the draft at each position; [] if unknown."""
        if not self.histogram or not self.num_steps:
            return []
        reached = [sum(n for accepted, n in self.histogram.items() if accepted > j) for j in range(max(self.histogram))]
        return [count / self.num_steps for count in reached]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict with the field names of vLLM's records."""
        return {
            "mean_acceptance_length": self.length,
            "draft_acceptance_rate": self.rate,
            "acceptance_histogram": {str(accepted): n for accepted, n in sorted(self.histogram.items())},
            "num_spec_steps": self.num_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafts,
            "per_position_acceptance_rates": self.by_position,
        }


def pooled(records: Iterable[Acceptance]) -> Acceptance:
    """Return the sum of records."""
    steps = drafts = accepted = 0
    histogram: Counter[int] = Counter()
    for record in records:
        steps += record.num_steps
        drafts += record.num_drafts
        accepted += record.num_accepted
        histogram.update(record.histogram)
    return Acceptance(steps, drafts, accepted, dict(histogram))


def read_record(answer: dict[str, Any]) -> Acceptance | None:
    """Return `metrics.speculative_decoding` of a response or chunk, or of its only choice; None if malformed."""
    metrics = answer.get("metrics")
    record = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    choices = answer.get("choices")
    if record is None and isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        record = choices[0].get("speculative_decoding_stats")  # vLLM before 0.32
    if not isinstance(record, dict):
        return None
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    counts: list[Any] = [record.get(name) for name in names]
    if not all(_is_count(count) for count in counts):
        return None
    steps, drafts, accepted = counts
    return Acceptance(steps, drafts, accepted, _histogram(record.get("acceptance_histogram")))


def read_counters(page: str) -> Acceptance | None:
    """Return counters since the server's start, with vLLM's names or ours; None without any, ValueError if malformed.

    The histogram follows from accepted drafts by position, since a step accepts a draft only after all before it.
    """
    sums: dict[str, Counter[str]] = {prefix: Counter() for prefix in _PREFIXES}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            prefix = next((prefix for prefix in _PREFIXES if sample.name.startswith(prefix)), None)
            if prefix is not None and 0 <= sample.value < 2**63:
                name = sample.name.removeprefix(prefix)
                if name == "num_accepted_tokens_per_pos_total":
                    name = sample.labels.get("position", "")
                sums[prefix][name] += int(sample.value)
    found = next((counts for counts in sums.values() if "num_drafts_total" in counts), None)
    if found is None:
        return None
    steps, num_positions = found["num_drafts_total"], 0
    while str(num_positions) in found and num_positions < _MAX_POSITIONS:
        num_positions += 1
    reached = [steps, *(found[str(j)] for j in range(num_positions)), 0]
    histogram = {j: n - after for j, (n, after) in enumerate(itertools.pairwise(reached)) if n - after}
    drafts, accepted = found["num_draft_tokens_total"], found["num_accepted_tokens_total"]
    return Acceptance(steps, drafts, accepted, histogram if num_positions else {})


def between(before: Acceptance, after: Acceptance) -> Acceptance:
    """Return the counts between two readings."""
    places = before.histogram.keys() | after.histogram.keys()
    histogram = {j: n for j in places if (n := after.histogram.get(j, 0) - before.histogram.get(j, 0))}
    return Acceptance(
        after.num_steps - before.num_steps,
        after.num_drafts - before.num_drafts,
        after.num_accepted - before.num_accepted,
        histogram,
    )


def _histogram(value: Any) -> dict[int, int]:
    """Read a map of counts by accepted drafts, or a list; {} if it is neither."""
    entries = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(entries, dict) or len(entries) > _MAX_POSITIONS:
        return {}
    found = {}
    for key, count in entries.items():
        if not (str(key).isascii() and str(key).isdigit() and len(str(key)) < 5 and _is_count(count)):
            return {}
        if count:
            found[int(key)] = count
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
