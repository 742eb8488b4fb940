"""Write the table of request fields into docs/reference/request_fields.md, between its markers.

    python scripts/write_request_fields.py [--check]

The rows stand in faser_trtllm/core/sampling_params.py and faser_trtllm/serving/text/request.py. --check: write nothing,
exit with 1 if the page has an old table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from faser_trtllm.core.request_field import Bounds, rows
from faser_trtllm.serving.text.request import TextRequest

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "request_fields.md"
TABLE = re.compile(r"(<!-- request fields -->\n).*?(<!-- end of request fields -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with its table as it follows from the rows."""
    return TABLE.sub(lambda found: f"{found[1]}{_fields()}{found[2]}", page)


def _fields() -> str:
    lines = []
    for row in rows(TextRequest):
        kind = f"{row.dtype}{' list' if row.is_list else ''}"
        theirs = " ".join(f"`{name}`" for name in (row.trtllm, row.older_name) if name)
        default = "" if row.default in (None, ()) else str(row.default).removesuffix(".0").lower()
        openai = ""
        if row.openai:
            limit = _limit_of(row.openai_bounds)
            name = "yes" if row.openai == row.name else f"`{row.openai}`"
            openai = f"{name}, {limit}" if limit and limit != _limit_of(row.bounds) else name
        lines.append((f"`{row.name}`", kind, default, _limit_of(row.bounds), theirs, openai, row.help))
    return table(("input", "type", "default", "allowed", "TensorRT-LLM", "OpenAI API", "meaning"), lines)


def _limit_of(bounds: Bounds | None) -> str:
    return "" if bounds is None else bounds.limit


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table without padding."""
    return "".join(f"|{'|'.join(cells)}|\n" for cells in (titles, ("---",) * len(titles), *lines))


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    if written(page) == page:
        return 0
    if arguments == ["--check"]:
        print(f"{PAGE} has an old table; run python scripts/write_request_fields.py", file=sys.stderr)
        return 1
    PAGE.write_text(written(page))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
