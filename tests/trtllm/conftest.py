from __future__ import annotations

import pytest

from tests.trtllm import fakes


@pytest.fixture(scope="module")
def modules():
    """The stand-ins for TensorRT-LLM's modules, where `import` finds them."""
    with pytest.MonkeyPatch.context() as patch:
        yield fakes.install(patch)
