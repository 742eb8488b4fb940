"""Triton's metrics page, as new as the request for it.

The engine publishes once a second, and clients such as vLLM's benchmark read the page right before and after their
load: what is missing then would be missing in their numbers.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request

MAX_WAIT_S = 1.5
_PERIOD_S = 0.05
_TIMEOUT_S = 5.0
_STAMP = re.compile(rb'^nv_trt_llm_general_metrics\{[^}]*general_type="timestamp"[^}]*\} (\S+)', re.MULTILINE)
"""The series that changes with every publication."""


async def fresh_page(url: str) -> bytes:
    """The page at this address once the engine has published again, or after MAX_WAIT_S; raises OSError."""
    page = await asyncio.to_thread(_read, url)
    stamp = _STAMP.search(page)
    if stamp is None:
        return page
    loop = asyncio.get_running_loop()
    end_s = loop.time() + MAX_WAIT_S
    while loop.time() < end_s:
        await asyncio.sleep(_PERIOD_S)
        page = await asyncio.to_thread(_read, url)
        now = _STAMP.search(page)
        if now is None or now[1] != stamp[1]:
            break
    return page


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        page: bytes = answer.read()
        return page
