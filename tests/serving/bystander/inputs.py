"""A worst request as the tensors that its model gets."""

from __future__ import annotations

import numpy as np

from faser_trtllm.serving.client import to_tensor


def tensors_of(case):
    return {name: np.repeat(to_tensor(name, value), case.batch, axis=0) for name, value in case.fields.items()}
