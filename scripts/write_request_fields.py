"""Write the tables of request fields into the documents, between their markers.

    python scripts/write_request_fields.py [--check]

The rows stand in faser_trtllm/core/sampling_params.py and faser_trtllm/serving/text/request.py. --check: write nothing,
exit with 1 if a document has old tables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from faser_trtllm.core.request_field import Bounds, rows
from faser_trtllm.serving.text.request import TextRequest

DOCS = Path(__file__).parent.parent / "docs"
DOCUMENTS = (DOCS / "request_fields.md", DOCS / "openai.md")
TABLE = re.compile(r"(<!-- request fields: (\w+) -->\n).*?(<!-- end of request fields -->)", re.DOTALL)


def written(document: str) -> str:
    """The document with its tables as they follow from the rows."""
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]}{found[3]}", document)


def _triton() -> str:
    lines = []
    for row in rows(TextRequest):
        kind = f"{row.dtype}{' list' if row.is_list else ''}"
        theirs = " ".join(f"`{name}`" for name in (row.trtllm, row.older_name) if name)
        default = "" if row.default in (None, ()) else str(row.default).removesuffix(".0").lower()
        lines.append((f"`{row.name}`", kind, default, _limit_of(row.bounds), theirs, row.help))
    return _table(("input", "type", "default", "allowed", "TensorRT-LLM's other name", ""), lines)


def _openai() -> str:
    fields = [row for row in rows(TextRequest) if row.openai]
    return _table(("field", "allowed", ""), [(f"`{f.openai}`", _limit_of(f.openai_bounds), f.help) for f in fields])


def _limit_of(bounds: Bounds | None) -> str:
    return "" if bounds is None else bounds.limit


def _table(titles: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rule = ("---",) * len(titles)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, rule, *lines))


TABLES = {"triton": _triton(), "openai": _openai()}


def main(arguments: list[str]) -> int:
    stale = [path for path in DOCUMENTS if written(path.read_text()) != path.read_text()]
    for path in stale:
        if arguments == ["--check"]:
            print(f"{path} has old tables; run python scripts/write_request_fields.py", file=sys.stderr)
        else:
            path.write_text(written(path.read_text()))
    return int(bool(stale) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
