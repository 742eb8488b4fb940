"""A model's configuration, and the reason why it could not be opened."""

import json

import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.engine_process.model import ModelConfig, load_model_config, note_start_error
from faser_trtllm.serving.engine_process.wire import OpenFrame


def open_frame(engine_dir, repository):
    parameters = {"engine_dir": {"string_value": str(engine_dir)}}
    return OpenFrame(0, "faser", "1", str(repository), json.dumps({"parameters": parameters}))


def test_a_missing_engine_dir_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("FASER_ENGINE_DIR", raising=False)
    monkeypatch.delenv("FASER_CONFIG", raising=False)
    with pytest.raises(InvalidArgumentError, match="engine_dir is not set"):
        load_model_config(open_frame("", tmp_path))


def test_environment_wins_over_file_and_parameters(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "faser.yaml").write_text("engine_dir: nowhere\ncancellation_check_period_ms: 1\n")
    monkeypatch.delenv("FASER_CONFIG", raising=False)
    monkeypatch.setenv("FASER_ENGINE_DIR", "here")
    config = load_model_config(open_frame("elsewhere", tmp_path))
    assert (config.engine_dir, config.cancellation_check_period_ms) == ("here", 1)


def test_what_a_configuration_says_of_special_tokens_is_the_default_of_requests():
    def defaults(**values):
        parameters = {name: {"string_value": value} for name, value in values.items()}
        return ModelConfig.of(OpenFrame(0, "m", "1", "", json.dumps({"parameters": parameters}))).request_defaults()

    assert defaults(add_special_tokens="false", skip_special_tokens="True") == {
        "add_special_tokens": False,
        "skip_special_tokens": True,
    }
    assert defaults(add_special_tokens="", normalize_log_probs="false") == {}


def test_the_reason_of_a_failed_start_is_left_to_the_launcher_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("FASER_RUN_DIR", raising=False)
    note_start_error("nobody reads it")
    monkeypatch.setenv("FASER_RUN_DIR", str(tmp_path))
    note_start_error("what was wrong")
    assert (tmp_path / "startup_error").read_text() == "what was wrong"
