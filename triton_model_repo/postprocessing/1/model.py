"""The Triton side: hands requests to faser_trtllm.serving.triton.tokens."""

import triton_python_backend_utils as pb_utils

from faser_trtllm.serving.triton.tokens import open_token_model


class TritonPythonModel:
    def initialize(self, args):
        self.execute = open_token_model(pb_utils, args).execute
