"""Communication between the ranks of a tensor-parallel target: torch.distributed, by NCCL on GPUs and gloo on the host.

Ranks only exchange data and never add it up, so no result depends on the number of ranks or on the library's
algorithms. Collectives run in the order of the target's passes, on the current stream, and can be captured with NCCL.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from faser_trtllm.builder.shard import Shard
from faser_trtllm.core.closing import Closing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TIMEOUT_S = 120.0  # of one collective; at the start, a rank may wait for another rank to compile kernels
STORE_FILE = "ranks"


class RankGroup(Closing):
    """The group of all ranks. A process has one group at a time; use a `with` block."""

    def __init__(self, shard: Shard, directory: Path, backend: str, device: torch.device) -> None:
        """Wait for the other ranks. directory: shared by all, empty at first. backend: "nccl" for GPU tensors, or
        "gloo"."""
        import torch.distributed as dist

        self.shard = shard
        # All ranks are on one machine; by default, gloo listens on the address of the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            backend,
            init_method=(directory / STORE_FILE).as_uri(),
            rank=shard.rank,
            world_size=shard.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        self._host_group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, part: Tensor, out: Tensor) -> None:
        """Write every rank's part [rows, width], contiguous, to its columns of out [rows, size * width]."""
        import torch
        import torch.distributed as dist

        rows, width = part.shape
        parts = torch.empty((self.shard.size * rows, width), dtype=part.dtype, device=part.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(parts, part)
        out.view(rows, self.shard.size, width).copy_(parts.view(self.shard.size, rows, width).transpose(0, 1))

    def maximum(self, tensor: Tensor) -> None:
        """Replace each element by the maximum over all ranks."""
        import torch.distributed as dist

        dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def least(self, number: int) -> int:
        """Return the minimum of all ranks' numbers, on the host."""
        import torch
        import torch.distributed as dist

        found = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._host_group)
        return int(found[0])

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
