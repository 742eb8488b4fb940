"""Reads Triton's metrics page and waits for it to be current.

The engine publishes metrics once a second, and clients such as vLLM's benchmark read the page right before and after
their load, so a page that is up to a second old would falsify their numbers.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import urllib.request

MAX_WAIT_S = 1.5
_PERIOD_S = 0.05
_TIMEOUT_S = 5.0
_STAMP = re.compile(rb'^nv_trt_llm_general_metrics\{[^}]*general_type="timestamp"[^}]*\} (\S+)', re.MULTILINE)
"""Matches the timestamp, which changes with every publication."""


async def fresh_page(url: str) -> bytes:
    """Return the page once the engine has published again, or after MAX_WAIT_S; raise OSError."""
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
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            page: bytes = answer.read()
            return page
    except http.client.HTTPException as error:
        raise OSError(f"{url} does not speak HTTP: {error!r}") from error
