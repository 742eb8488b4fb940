"""The metrics that an engine process sends, as plugins/triton/metrics.cpp reads them."""

from __future__ import annotations

import struct

DECLARE, ADD, SET, OBSERVE = 1, 2, 3, 4


class Metrics:
    """values: the last number of each series, by its name and its labels but model and version, as in a scrape."""

    def __init__(self):
        self.values = {}
        self._names = {}

    def apply(self, body):
        at = 0

        def take(layout):
            nonlocal at
            values = struct.unpack_from(f"<{layout}", body, at)
            at += struct.calcsize(f"<{layout}")
            return values if len(values) > 1 else values[0]

        def text():
            return take(f"{take('I')}s").decode()

        while at < len(body):
            what, number = take("BI")
            if what == DECLARE:
                take("B")
                name, _ = text(), text()
                labels = [(text(), text()) for _ in range(take("I"))]
                take(f"{take('I')}d") if struct.unpack_from("<I", body, at)[0] else take("I")
                shown = ",".join(f'{key}="{value}"' for key, value in labels if key not in ("model", "version"))
                self._names[number] = f"{name}{{{shown}}}" if shown else name
            else:
                value, name = take("d"), self._names[number]
                self.values[name] = value if what == SET else self.values.get(name, 0.0) + value
