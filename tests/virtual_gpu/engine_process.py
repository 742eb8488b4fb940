"""The engine process of `faser serve` with the virtual GPU: FASER_ENGINE_MODULE names this module."""

from __future__ import annotations

import torch

from tests.virtual_gpu.__main__ import write_counters
from tests.virtual_gpu.device.install import install


def main() -> None:
    torch.set_num_threads(1)
    install()
    write_counters()
    from faser_trtllm.serving.engine_process.main import main as run

    run()


if __name__ == "__main__":
    main()
