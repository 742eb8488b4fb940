"""The Triton side of faser_trtllm: hands requests to faser_trtllm.serving.triton.model."""

import triton_python_backend_utils as pb_utils

from faser_trtllm.serving.triton.model import open_model


class TritonPythonModel:
    def initialize(self, args):
        self._model = open_model(pb_utils, args)
        self.execute = self._model.execute

    def is_ready(self):
        return self._model.is_ready

    def finalize(self):
        self._model.close()
