"""`faser trtllm-serve`: TensorRT-LLM's LLM API and its OpenAI server with our drafter, over the generated stand-ins."""

from __future__ import annotations

import sys

import pytest

from faser_trtllm import cli
from faser_trtllm.errors import ConfigError
from faser_trtllm.trtllm import drafter as drafter_module
from faser_trtllm.trtllm.llm import open_llm
from tests.support.engine_dirs import make_engine_dir
from tests.trtllm import fakes, rules_py


class Llm:
    """Remembers what it was made of; what the stand-in takes is checked before."""

    def __init__(self, model, tokenizer, *defaults, **options):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.is_up = True

    def shutdown(self):
        self.is_up = False


SERVED = []


class Server:
    def __init__(self, generator, model, *rest):
        self.llm, self.model, self.rest = generator, model, rest

    async def __call__(self, host, port, sockets):
        SERVED.append((self, host, port, self.llm.is_up))


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    return make_engine_dir(tmp_path_factory.mktemp("pair"), max_batch_size=4, max_num_tokens=64, max_seq_len=160)


@pytest.fixture
def installed(monkeypatch):
    """Puts stand-ins of a version in place, in which LLM and server remember their arguments."""

    def install(version):
        SERVED.clear()
        forget()
        behaviors = {rules_py.LLM: Llm, rules_py.SERVER: Server}
        return fakes.install(monkeypatch, version=version, behaviors=behaviors)

    yield install
    forget()


def forget():
    for name in ("FaserDrafter", "FaserResources"):
        vars(drafter_module).pop(name, None)


@pytest.fixture
def serve(monkeypatch, capsys):
    """Runs the command -> exit code, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["faser", "trtllm-serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, capsys.readouterr().err

    return run


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc22", "1.4.0rc1"])
def test_the_server_has_an_llm_with_our_drafter(installed, serve, engine_dir, tmp_path, version):
    modules = installed(version)
    config = tmp_path / "llm.yaml"
    config.write_text("max_batch_size: 4\nkv_cache_config: {free_gpu_memory_fraction: 0.5}\ntensor_parallel_size: 1\n")
    flags = ["--max_draft_len", 3, "--max_concurrency", 2, "--num_threads", 1, "--host", "0.0.0.0", "--port", 8123]
    assert serve("a/model", "--engine_dir", engine_dir, *flags, "-c", config, "--tokenizer", "a/tokenizer") == (0, "")
    ((server, host, port, was_up),) = SERVED
    assert (host, port, was_up, server.llm.is_up) == ("0.0.0.0", 8123, True, False)
    assert (server.model, server.llm.model, server.llm.tokenizer) == ("a/model", "a/model", "a/tokenizer")
    options = server.llm.options
    config = options.pop("speculative_config")
    assert type(config) is modules["tensorrt_llm.llmapi"].UserProvidedDecodingConfig
    assert type(config.drafter) is drafter_module.FaserDrafter
    assert type(config.resource_manager) is drafter_module.FaserResources
    assert (config.max_draft_len, config.drafter.max_draft_len, config.max_concurrency) == (3, 3, 2)
    assert options == {
        "max_batch_size": 4,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
        "disable_overlap_scheduler": True,
    }


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("tensor_parallel_size: 2", "tensor_parallel_size is 2, and FaserDrafter would draft in each of the processes"),
        ("pipeline_parallel_size: 4", "pipeline_parallel_size is 4"),
        ("speculative_config: {decoding_type: NGram}", "speculative_config is given twice"),
        ("model: other", "model is given twice"),
        ("disable_overlap_scheduler: false", "disable_overlap_scheduler is False, and TensorRT-LLM does not overlap"),
        ("[", "is not valid YAML"),
    ],
)
def test_what_the_drafter_cannot_work_with_is_one_sentence(installed, serve, engine_dir, tmp_path, yaml, says):
    installed("1.2.1")
    config = tmp_path / "llm.yaml"
    config.write_text(yaml)
    code, error = serve("a/model", "--engine_dir", engine_dir, "--config", config)
    assert (code, SERVED) == (2, [])
    assert error.startswith("faser: ")
    assert error.count("\n") == 1
    assert says in error


@pytest.mark.parametrize(("version", "says"), [("1.5.0", "FaserDrafter is not written for it"), ("1.1.0", "1.1.0 is")])
def test_a_version_that_is_not_known_is_one_sentence(installed, serve, engine_dir, version, says):
    installed(version)
    code, error = serve("a/model", "--engine_dir", engine_dir)
    assert code == 2
    assert says in error
    assert error.count("\n") == 1


def test_wrong_options_of_the_drafter_are_refused_before_a_model_is_loaded(installed, serve, engine_dir):
    installed("1.2.1")
    code, error = serve("a/model", "--engine_dir", engine_dir, "--max_draft_len", 0)
    assert (code, SERVED) == (2, [])
    assert "max_draft_len is 0" in error


def test_an_llm_of_several_gpus_is_refused(installed, engine_dir):
    installed("1.2.1")
    drafter = drafter_module.FaserDrafter(engine_dir, max_draft_len=2)
    with pytest.raises(ConfigError, match="context_parallel_size is 2"):
        open_llm("a/model", drafter, {"context_parallel_size": 2})
    assert open_llm("a/model", drafter).options["speculative_config"].drafter is drafter
