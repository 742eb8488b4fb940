"""Reads what a /metrics port serves: Prometheus' text format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from faser_trtllm.errors import UnavailableError

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"\s*,?\s*')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Sample:
    """One series: its labels and its value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scrape:
    """All series of one scrape by name; a histogram is its name_bucket, name_sum and name_count."""

    samples: Mapping[str, list[Sample]]
    types: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels; 0 if there are none."""
        return sum(sample.value for sample in self._matching(name, labels))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of a label, in order of appearance."""
        found: defaultdict[str, float] = defaultdict(float)
        for sample in self._matching(name, labels):
            if label in sample.labels:
                found[sample.labels[label]] += sample.value
        return dict(found)

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound, in order; {} if it is not there."""
        counts = self.by_label(f"{name}_bucket", "le", **labels)
        return dict(sorted((float(bound), count) for bound, count in counts.items()))

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterable[Sample]:
        return (s for s in self.samples.get(name, ()) if labels.items() <= s.labels.items())


def parse_metrics(text: str) -> Scrape:
    """Raises UnavailableError for text that is not in Prometheus' format."""
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    types: dict[str, str] = {}
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(None, 3)
            types[name] = kind
        if not line or line.startswith("#"):
            continue
        found = _LINE.match(line)
        value = _number(found[3]) if found else None
        if found is None or value is None:
            raise UnavailableError(f"the answer is not in Prometheus' text format: {line[:80]!r}; check the address")
        labels = {name: _ESCAPE.sub(_unescaped, text) for name, text in _LABEL.findall(found[2] or "")}
        samples[found[1]].append(Sample(labels, value))
    return Scrape(dict(samples), types)


def quantile(q: float, buckets: Mapping[float, float]) -> float | None:
    """Prometheus' histogram_quantile: linear inside a bucket, the last bound above it; None without values."""
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


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
