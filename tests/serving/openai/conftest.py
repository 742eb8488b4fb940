"""One Triton server over real engines, and one `faser openai` in front of it, for the tests of this folder."""

import pytest

from faser_trtllm.models.tokenizer import Tokenizer
from tests.support.checkpoints import write_tokenizer
from tests.support.engine_dirs import make_engine_dir
from tests.support.openai_frontend import MAX_SEQ_LEN, TEMPLATE, Frontend
from tests.support.triton_server import Server


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer of 320 tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 320)
    return Tokenizer.load(directory)


@pytest.fixture(scope="package")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 16, "max_seq_len": MAX_SEQ_LEN, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), TEMPLATE, **sizes)


@pytest.fixture(scope="package")
def triton(engine_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("triton") / "log"
    with Server(engine_dir, speculation="fixed:4", log=log) as server:
        yield server.wait_ready()


@pytest.fixture(scope="package")
def frontend(triton, engine_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("frontend") / "log"
    with Frontend(log, "--url", f"grpc://{triton.grpc_url}", "--engine_dir", engine_dir) as frontend:
        yield frontend.wait_ready()


@pytest.fixture(scope="package")
def client(frontend):
    with frontend.client() as client:
        yield client
