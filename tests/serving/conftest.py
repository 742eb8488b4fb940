"""Both edges: what runs inside Triton. Tests of what clients see run over each."""

import pytest


@pytest.fixture(scope="module", params=["python", "native"])
def edge(request):
    return request.param
