"""Messages between the ranks of a tensor-parallel target: torch.distributed, by NCCL on GPUs and gloo on the host.

Only data moves, and nothing is added up, so no result depends on the number of ranks or on the library's algorithms.
Collectives run in the order of the target's passes, on the stream that is current, and can be captured with NCCL.
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

TIMEOUT_S = 120.0  # of one collective; kernels may be compiled while a rank waits for the others at the start
STORE_FILE = "ranks"


class RankGroup(Closing):
    """All ranks; one group at a time in a process. directory: of all ranks, empty before. Use a `with` block."""

    def __init__(self, shard: Shard, directory: Path, backend: str, device: torch.device) -> None:
        """Waits for the other ranks. backend: "nccl" for tensors on a GPU, or "gloo"."""
        import torch.distributed as dist

        self.shard = shard
        # All ranks are on one machine; gloo would listen on the address that the host's name has.
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
        """part [rows, width] of every rank, side by side in rank order -> out [rows, size * width]; both contiguous."""
        import torch
        import torch.distributed as dist

        rows, width = part.shape
        parts = torch.empty((self.shard.size * rows, width), dtype=part.dtype, device=part.device)
        dist.all_gather_single(parts, part)
        out.view(rows, self.shard.size, width).copy_(parts.view(self.shard.size, rows, width).transpose(0, 1))

    def maximum(self, tensor: Tensor) -> None:
        """Each element becomes the greatest of all ranks'."""
        import torch.distributed as dist

        dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, on the host."""
        import torch
        import torch.distributed as dist

        found = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._host_group)
        return int(found[0])

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
