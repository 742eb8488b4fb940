"""GPUs in the cost model: sizes, and the bandwidth that a share of the SMs can use."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError

SATURATION_POWER = 2.2  # bandwidth over SMs: (1 + (a x)^-2.2)^(-1/2.2), fitted to public curves


@dataclass(frozen=True)
class Gpu:
    """A GPU. gb_per_ms: HBM read bandwidth in practice. tflops: dense bf16 in practice. GB are 10^9 bytes.
    sm_gb_per_ms: limit of one SM. sm_step: green contexts have a multiple of this many SMs."""

    name: str
    num_sms: int
    memory_gb: float
    gb_per_ms: float
    tflops: float
    sm_gb_per_ms: float
    sm_step: int
    has_fp8: bool = True

    def bandwidth_share(self, share: float) -> float:
        """Return the share of the bandwidth that a share (above 0, to 1) of the SMs can use."""
        return self._saturation(share) / self._saturation(1.0)

    def split(self, share: float) -> int:
        """Return the SMs of a green context with about this share of all, which leaves at least one step."""
        steps = max(1, round(share * self.num_sms / self.sm_step))
        return min(steps, (self.num_sms - 1) // self.sm_step) * self.sm_step

    def _saturation(self, share: float) -> float:
        wanted = share * self.num_sms * self.sm_gb_per_ms / self.gb_per_ms
        found: float = (1.0 + wanted**-SATURATION_POWER) ** (-1.0 / SATURATION_POWER)
        return found


# Bandwidths: 0.9 of the specified ones. An SM uses 45 GB/s on Hopper by two public curves; elsewhere it is assumed.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 132, 80.0, 3.05, 640.0, 0.045, 8),
        Gpu("h200", 132, 141.0, 4.3, 700.0, 0.045, 8),
        Gpu("b200", 148, 180.0, 6.9, 1550.0, 0.060, 8),
        Gpu("a100", 108, 80.0, 1.75, 260.0, 0.044, 2, has_fp8=False),
        Gpu("l40s", 142, 48.0, 0.78, 270.0, 0.030, 2),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name, in any case; raise InvalidArgumentError if it is unknown."""
    found = GPUS.get(name.lower())
    if found is None:
        raise InvalidArgumentError(f"gpu is {name!r}, the cost model knows {', '.join(GPUS)}; take the nearest of them")
    return found
