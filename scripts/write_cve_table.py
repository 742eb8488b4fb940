"""Write the table of Triton's known vulnerabilities into docs/operate.md, and tell which concern what we ship.

    python scripts/write_cve_table.py --csaf SOURCE [--osv SOURCE] [--date YYYY-MM-DD] [--check]

SOURCE is a folder, a zip archive, or the URL of one. --csaf: advisories as NVIDIA publishes them, e.g. the archive of
github.com/NVIDIA/product-security. --osv: records of osv.dev's ecosystem PyPI, which are compared with locks/. --date:
of the data, if not that of the newest advisory. --check: write nothing; exit with 1 if a vulnerability rated High or
worse, or not rated, is in the image of deploy/Dockerfile or in locks/ and has been known for over MAX_AGE_DAYS.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import re
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "operate.md"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
LOCKS = ROOT / "locks"
TABLE = re.compile(r"( *<!-- vulnerabilities of Triton -->\n).*?( *<!-- end of vulnerabilities -->)", re.DOTALL)
PRODUCT = "Triton Inference Server"
BUNDLED = Version("24.10")  # of the development server, Triton 2.51: older fixes are in it
HIGH = 7.0
MAX_AGE_DAYS = 14
OSV_SCORES = {"LOW": 3.0, "MODERATE": 5.0, "MEDIUM": 5.0, "HIGH": 8.0, "CRITICAL": 9.5}
UNRATED = 10.0  # what nobody has rated counts as the worst


@dataclass(frozen=True, slots=True)
class Span:
    """Versions from `low` on; up to `high`, with or without it. None: no bound."""

    low: Version | None = None
    high: Version | None = None
    with_high: bool = False

    def __contains__(self, version: Version) -> bool:
        if self.low is not None and version < self.low:
            return False
        return self.high is None or version < self.high or (self.with_high and version == self.high)


@dataclass(frozen=True, slots=True)
class Vulnerability:
    """One vulnerability in one product. spans: what it is in. fixed: the first version without it, if there is one."""

    name: str
    source: str
    day: datetime.date
    score: float
    product: str
    spans: tuple[Span, ...]
    fixed: Version | None
    impacts: str = ""

    def concerns(self, version: Version) -> bool:
        return any(version in span for span in self.spans)


def documents(source: str) -> Iterator[dict[str, Any]]:
    """Yield every JSON object of a folder, an archive or a URL."""
    if source.startswith("https://"):
        with urllib.request.urlopen(source, timeout=300) as answer:
            yield from _archived(answer.read())
    elif Path(source).is_file():
        yield from _archived(Path(source).read_bytes())
    else:
        for path in sorted(Path(source).rglob("*.json")):
            yield from _objects(path.read_bytes())


def _archived(content: bytes) -> Iterator[dict[str, Any]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".json"):
                yield from _objects(archive.read(name))


def _objects(content: bytes) -> Iterator[dict[str, Any]]:
    value = json.loads(content)
    if isinstance(value, dict):
        yield value


def csaf_vulnerabilities(document: dict[str, Any]) -> Iterator[Vulnerability]:
    """Yield the vulnerabilities of PRODUCT in a CSAF advisory, one per set of versions; none for other JSON files."""
    if "csaf_version" not in document.get("document", {}):
        return
    names = dict(_products(document["product_tree"].get("branches", [])))
    tracking = document["document"]["tracking"]
    for entry in document["vulnerabilities"]:
        affected = [names[key] for key in entry["product_status"].get("known_affected", ()) if key in names]
        if not affected:
            continue
        fixed = [names[key] for key in entry["product_status"].get("fixed", ()) if key in names]
        firsts = sorted(version for text in fixed for version in _versions(text))
        day = entry.get("release_date") or tracking["initial_release_date"]
        scores = [score["cvss_v3"]["baseScore"] for score in entry.get("scores", ()) if "cvss_v3" in score]
        yield Vulnerability(
            entry["cve"],
            str(tracking["id"]),
            datetime.date.fromisoformat(day[:10]),
            max(scores, default=UNRATED),
            PRODUCT,
            tuple(span_of(text) for text in affected),
            firsts[-1] if firsts else None,
            next((note["text"] for note in entry.get("notes", ()) if note.get("title") == "Impacts"), ""),
        )


def _products(branches: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the id and the versions, as text, of each entry of PRODUCT."""
    for branch in branches:
        if "product" in branch and branch["category"].startswith("product_version") and PRODUCT in branch["name"]:
            yield branch["product"]["product_id"], branch["product"]["name"]
        yield from _products(branch.get("branches", []))


def span_of(text: str) -> Span:
    """Return the versions that an advisory's text means: all of them if it names none."""
    found = _versions(text)
    if not found:
        return Span()
    if re.search(r"\b(prior to|before|earlier than)\b", text):
        return Span(high=found[-1])
    # "24.11" alone is the last of those that were supported.
    return Span(found[0] if len(found) > 1 else None, found[-1], with_high=True)


def _versions(text: str) -> list[Version]:
    text = re.sub(r"^0\.0(?=\d\d\.\d\d)", "0.0-", text)  # "0.026.05", as an advisory of 2026 has it
    return [Version(number) for number in re.findall(r"\d+(?:\.\d+)+", text)]


def osv_vulnerabilities(document: dict[str, Any]) -> Iterator[Vulnerability]:
    """Yield the vulnerabilities of PyPI packages in an OSV record that is not withdrawn; none for other JSON files."""
    if "affected" not in document or "id" not in document or "withdrawn" in document:
        return
    day = datetime.date.fromisoformat(document.get("published", document.get("modified", "1970-01-01"))[:10])
    rating = document.get("database_specific", {}).get("severity")
    for affected in document["affected"]:
        package = affected.get("package", {})
        if package.get("ecosystem") != "PyPI":
            continue
        spans = [span for item in affected.get("ranges", ()) if item["type"] != "GIT" for span in _osv_spans(item)]
        spans += [Span(version, version, True) for version in map(_version, affected.get("versions", ())) if version]
        highs = sorted(span.high for span in spans if span.high is not None and not span.with_high)
        score = OSV_SCORES.get(str(rating).upper(), UNRATED)
        name, fixed = canonical(package["name"]), highs[-1] if highs else None
        yield Vulnerability(document["id"], "OSV", day, score, name, tuple(spans), fixed)


def _osv_spans(item: dict[str, Any]) -> Iterator[Span]:
    low: Version | None = None
    is_open = False
    for event in item["events"]:
        if "introduced" in event:
            low, is_open = _version(event["introduced"]), True
        elif "fixed" in event or "last_affected" in event:
            yield Span(low, _version(event.get("fixed") or event["last_affected"]), "last_affected" in event)
            is_open = False
    if is_open:
        yield Span(low)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(folder: Path) -> set[tuple[str, Version]]:
    """Return the packages and versions of the lock files."""
    text = "".join(path.read_text() for path in folder.glob("*.txt"))
    pins = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    return {(canonical(name), Version(version)) for name, version in pins}


def shown(version: Version) -> str:
    """The version of a container as NVIDIA writes it."""
    return f"{version.major}.{version.minor:02d}"


def table(vulnerabilities: list[Vulnerability], day: datetime.date) -> str:
    """Markdown: a row per advisory and fixed version, newest first, of what is in the development server."""
    rows: dict[tuple[datetime.date, str, str], list[Vulnerability]] = {}
    for item in vulnerabilities:
        if item.concerns(BUNDLED):
            fixed = shown(item.fixed) if item.fixed is not None else "none"
            rows.setdefault((item.day, item.source, fixed), []).append(item)
    lines = [f"NVIDIA's advisories up to {day}:", ""]
    lines += ["|bulletin|fixed in|worst score|CVE|impacts|", "|---|---|---|---|---|"]
    for (published, source, fixed), items in sorted(rows.items(), key=lambda row: row[0], reverse=True):
        impacts = sorted({word.strip().lower() for item in items for word in item.impacts.split(",") if word.strip()})
        names = ", ".join(sorted(item.name.removeprefix("CVE-") for item in items))
        worst = max(item.score for item in items)
        lines.append(f"|{source}, {published}|{fixed}|{worst:g}|{names}|{', '.join(impacts)}|")
    return "".join(f"{line}\n" for line in lines)


def findings(vulnerabilities: list[Vulnerability], image: Version, pins: set[tuple[str, Version]]) -> list[str]:
    """Return a line for each vulnerability in the image or in a locked package, the worst first."""
    found = []
    for item in sorted(vulnerabilities, key=lambda item: -item.score):
        pinned = [(f"{name} {pin}", pin) for name, pin in sorted(pins) if name == item.product]
        candidates = [(f"{PRODUCT} {shown(image)}", image)] if item.product == PRODUCT else pinned
        found += [
            f"{item.name} ({item.score:g}, {item.source}, {item.day}) is in {name}"
            for name, version in candidates
            if item.concerns(version)
        ]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csaf", required=True)
    parser.add_argument("--osv")
    parser.add_argument("--date", type=datetime.date.fromisoformat)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)

    known = [item for document in documents(given.csaf) for item in csaf_vulnerabilities(document)]
    if not known:
        print(f"{given.csaf} has no advisory about {PRODUCT}; name a copy of NVIDIA/product-security", file=sys.stderr)
        return 2
    day = given.date or max(item.day for item in known)
    records = documents(given.osv) if given.osv else ()
    image = Version(re.search(r"tritonserver:(\d+\.\d+)-", DOCKERFILE.read_text())[1])  # type: ignore[index]
    everything = known + [item for record in records for item in osv_vulnerabilities(record)]
    pins = locked(LOCKS)
    for line in findings(everything, image, pins):
        print(line)
    if given.check:
        since = datetime.date.today() - datetime.timedelta(days=MAX_AGE_DAYS)
        old = findings([item for item in everything if item.score >= HIGH and item.day < since], image, pins)
        if old:
            print(f"{len(old)} of these are High or worse and older than {since}; take newer versions", file=sys.stderr)
        return int(bool(old))
    DOCUMENT.write_text(TABLE.sub(lambda found: f"{found[1]}{table(known, day)}{found[2]}", DOCUMENT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
