"""The Triton side of faser_trtllm: hands requests to faser_trtllm.serving.triton_model."""

import triton_python_backend_utils as pb_utils

from faser_trtllm.serving.triton_model import open_model


class TritonPythonModel:
    def initialize(self, args):
        self._model = open_model(pb_utils, args)

    def execute(self, requests):
        self._model.execute(requests)

    def is_ready(self):
        return self._model.is_ready

    def finalize(self):
        self._model.close()
