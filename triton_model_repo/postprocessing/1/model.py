"""The Triton side: hands requests to faser_trtllm.serving.triton.tokens."""

from pathlib import Path

import triton_python_backend_utils as pb_utils

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.errors import FaserError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.triton.model import load_model_config
from faser_trtllm.serving.triton.tokens import open_token_model


class TritonPythonModel:
    def initialize(self, args):
        try:
            engines = EngineDir.load(Path(load_model_config(args).engine_dir))
            tokenizer = Tokenizer.load(engines.tokenizer_dir)
        except FaserError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self.execute = open_token_model(pb_utils, args, tokenizer).execute
