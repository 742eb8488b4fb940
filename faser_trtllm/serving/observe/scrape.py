"""Parses a scrape of /metrics, and looks up its series by name and labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import UnavailableError

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Scrape:
    """All series of one scrape by name; a histogram has the series NAME_bucket, NAME_sum and NAME_count."""

    samples: Mapping[str, list[Sample]]

    def get(self, name: str, **labels: str) -> float:
        """Return the sum of the series that have these labels; 0 if there are none."""
        return sum(sample.value for sample in self._matching(name, labels))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return sums by the value of a label, in order of appearance."""
        found: defaultdict[str, float] = defaultdict(float)
        for sample in self._matching(name, labels):
            if label in sample.labels:
                found[sample.labels[label]] += sample.value
        return dict(found)

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, in order; {} if it is missing."""
        counts = self.by_label(f"{name}_bucket", "le", **labels)
        return dict(sorted((float(bound), count) for bound, count in counts.items()))

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterable[Sample]:
        return (s for s in self.samples.get(name, ()) if labels.items() <= s.labels.items())


def parse_metrics(text: str) -> Scrape:
    """Parse text in Prometheus' format; raise UnavailableError for any other text."""
    from prometheus_client.parser import text_string_to_metric_families

    # TYPE lines are dropped: the parser would append _total to the names of counters that lack it.
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                samples[sample.name].append(sample)
    except (ValueError, IndexError) as error:
        first = next((line for line in lines if line.strip()), "")
        raise UnavailableError(
            f"the answer is not in Prometheus' text format: it begins with {first[:80]!r}; check the address"
        ) from error
    return Scrape(dict(samples))


def quantile(q: float, buckets: Mapping[float, float]) -> float | None:
    """Return the quantile q of a histogram, linear inside a bucket like Prometheus; None without values."""
    bounds = list(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0.0:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if bound == float("inf"):
                return low
            inside = buckets[bound] - below
            return low + (bound - low) * (rank - below) / inside if inside > 0.0 else bound
        low, below = bound, buckets[bound]
    return low
