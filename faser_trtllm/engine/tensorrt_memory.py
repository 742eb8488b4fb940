"""Where every input and output of an engine's plans lies, on the device and on the host.

Not run on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.network.options import TensorSpec
from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.engine.tensorrt_device import Device

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}
HOST_DTYPES: dict[str, type[np.generic]] = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
    "int32": np.int32,
}
_CACHE_OUTPUT = re.compile(r"([kv]_cache)_out(_\d+)")


class EngineMemory:
    """One place per tensor name, as large as its largest shape, at a fixed address: captured graphs hold addresses.

    sizes: the largest size of each dimension by name. hidden_in and hidden_out are the two buffers of `hidden`, in
    turn; a cache output has its input's address, so that caches are updated in place.
    """

    def __init__(self, device: Device, file: PlanFile, sizes: Mapping[str, int]) -> None:
        self._device = device
        self._sizes = sizes
        self._addresses: dict[str, int] = {}
        self._host: dict[tuple[int, str], npt.NDArray[Any]] = {}
        self.hidden: tuple[int, int] | None = None
        self.hidden_row_bytes = 0
        try:
            for index, plan in enumerate(file.plans):
                for spec in plan.info.inputs:
                    self._place(spec)
                    if spec.dtype == "int32":
                        shape = self._largest(spec)
                        self._host[index, spec.name] = device.host_array((math.prod(shape),), np.int32)
                for spec in plan.info.outputs:
                    self._place(spec)
                    if spec.name in ("logits", "scores"):
                        self._host[index, spec.name] = device.host_array(self._largest(spec), HOST_DTYPES[spec.dtype])
        except BaseException:
            self.close()
            raise

    def address(self, name: str, read: int) -> int:
        """read: which hidden buffer holds the rows that a plan reads; it writes the other."""
        if name in ("hidden_in", "hidden_out"):
            assert self.hidden is not None
            return self.hidden[read if name == "hidden_in" else 1 - read]
        return self._addresses[_input_of(name)]

    def host(self, plan: int, name: str) -> npt.NDArray[Any]:
        """Page-locked memory of an int32 input (flat), of logits or of scores, of plan number `plan`."""
        return self._host[plan, name]

    def close(self) -> None:
        """Free everything. Closing twice is harmless."""
        addresses = [*self._addresses.values(), *(self.hidden or ())]
        arrays = list(self._host.values())
        self._addresses, self._host, self.hidden = {}, {}, None
        for address in addresses:
            self._device.free(address)
        for array in arrays:
            self._device.free_host(array)

    def _place(self, spec: TensorSpec) -> None:
        num_bytes = math.prod(self._largest(spec)) * ITEMSIZES[spec.dtype]
        if spec.name in ("hidden_in", "hidden_out"):
            if self.hidden is None:
                self.hidden = (self._device.allocate(num_bytes), 0)
                self.hidden = (self.hidden[0], self._device.allocate(num_bytes))
                self.hidden_row_bytes = num_bytes // self._sizes["rows"]
        elif _input_of(spec.name) not in self._addresses:
            self._addresses[_input_of(spec.name)] = self._device.allocate(num_bytes)

    def _largest(self, spec: TensorSpec) -> tuple[int, ...]:
        return tuple(self._sizes[size] if isinstance(size, str) else size for size in spec.shape)


def _input_of(name: str) -> str:
    """The input that an output is bound to, or the name itself."""
    match = _CACHE_OUTPUT.fullmatch(name)
    return f"{match[1]}{match[2]}" if match else name
