"""Flags of trtllm-build and trtllm-serve: taken, ignored with a reason, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.cli import main
from faser_trtllm.errors import ConfigError, FaserError, InvalidArgumentError
from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.trtllm.convert.convert import convert
from faser_trtllm.trtllm.convert.flags import BUILD_FLAGS, SERVE_FLAGS, judge_flags
from faser_trtllm.trtllm.convert.tokenizer import check_tokenizer
from tests.support.checkpoints import make_pair

SERVE = {
    "--max_batch_size 16": {"max_batch_size": 16},
    "--max_num_tokens=512": {"max_num_tokens": 512},
    "--max_seq_len 1024": {"max_seq_len": 1024},
    "--enable_chunked_prefill": {"scheduler_config": {"enable_chunked_context": True}},
    "--otlp_traces_endpoint http://localhost:4318": {"otlp_traces_endpoint": "http://localhost:4318"},
    "--kv_cache_free_gpu_memory_fraction 0.9": {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}},
    "--free_gpu_memory_fraction 0.9": {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}},
    "--kv_cache_dtype fp8": {"kv_cache_config": {"dtype": "fp8"}},
    "--kv_cache_free_gpu_mem_fraction 0.9": {"kv_cache_config": {"free_gpu_memory_fraction": 0.9}},
    "--backend pytorch": "faser build --backend chooses",
    "--tp_size 1": "that is the behavior here",
    "--max_beam_width 1": "that is the behavior here",
    "--log_level info": "messages of level warning",
    "--trust_remote_code": "code of a checkpoint is never run",
    "--enable_attention_dp": "there is nothing to divide",
    "--num_postprocess_workers 4": "the engine process detokenizes",
}
SERVE_REFUSED = {
    "--max_beam_width 4": "--max_beam_width is 4; beam search is not supported",
    "--tp_size 2": "--tp_size is 2; the GPUs of a model are counted by faser build --backend cuda --tp_size",
    "--pp_size 2": "--pp_size is 2; one device",
    "--ep_size 2": "--ep_size is 2; one device",
    "--kv_cache_dtype nvfp4": "the KV cache has the engine's type or fp8",
    "--reasoning_parser qwen3": "reasoning is not separated",
    "--tool_parser qwen3": "the output is not parsed",
    "--chat_template x.jinja": "only faser openai applies it; leave it out, or start faser openai with it",
    "--server_role CONTEXT": "prompt and generation run in one process",
    "--custom_tokenizer deepseek_v32": "only tokenizer.json is read",
    "--kv-connector lmcache": "KV caches are not shared between servers",
    "--max_batch_size many": "it must be a whole number",
    "--max_batch_sise 4": "--max_batch_sise is not an option; did you mean --max_batch_size?",
    "--engin_dir x": "did you mean --engine_dir?",
    "--free_gpu_memory_fraction 90": "it must be a number above 0 and at most 1",
    "--max_num_tokens": "--max_num_tokens has no value",
    "--tp_size --pp_size 1": "--tp_size has no value",
}
BUILD = {
    "--speculative_decoding_mode draft_tokens_external": "faser build takes the draft checkpoint",
    "--max_beam_width 1": "that is the behavior here",
    "--gpt_attention_plugin auto": "chooses its kernels",
    "--remove_input_padding enable": "that is the behavior here",
    "--lora_plugin disable": "that is the behavior here",
    "--use_paged_context_fmha enable": "chooses its kernels",
    "--kv_cache_type paged": "that is the behavior here",
    "--max_input_len 512": "max_seq_len bounds prompt and output",
    "--opt_num_tokens 8": "chooses its buckets",
    "--gather_generation_logits": "requests ask for them",
    "--workers 4": "one after another",
    "--monitor_memory": "memory and disk beforehand",
}
BUILD_REFUSED = {
    "--speculative_decoding_mode medusa": "only draft_tokens_external is supported",
    "--speculative_decoding_mode lookahead_decoding": "only draft_tokens_external is supported",
    "--speculative_decoding_mode eagle": "only draft_tokens_external is supported",
    "--speculative_decoding_mode explicit_draft_tokens": "only draft_tokens_external is supported",
    "--max_beam_width 2": "beam search is not supported",
    "--lora_dir a": "LoRA is not supported",
    "--lora_plugin auto": "LoRA is not supported",
    "--max_prompt_embedding_table_size 8": "prompt tables are not supported",
    "--max_multimodal_len 8": "prompt tables are not supported",
    "--kv_cache_type disabled": "the KV cache is paged",
    "--paged_kv_cache disable": "the KV cache is paged",
    "--gather_all_token_logits": "prompt tokens found in the KV cache",
    "--gather_context_logits": "prompt tokens found in the KV cache",
    "--strip_plan": "weights are built in",
    "--weight_streaming": "weights stay on the device",
    "--model_cls_file x.py": "model families are part of faser_trtllm",
    "--logits_dtype float16": "logits are float32",
    "--auto_parallel 2": "the GPUs of a model are counted by",
    "--gpt_atention_plugin auto": "did you mean --gpt_attention_plugin?",
    "--max_encoder_input_len 512": "is 512; encoder-decoder models are not served; leave it out",
}


@pytest.mark.parametrize(("known", "table"), [(SERVE_FLAGS, SERVE), (BUILD_FLAGS, BUILD)])
def test_flags_are_taken_or_ignored_with_a_reason(known: Any, table: dict[str, Any]) -> None:
    for line, expected in table.items():
        conversion = judge_flags(line.split(), known, ()).conversion
        if isinstance(expected, dict):
            assert conversion.serve == expected, line
        else:
            assert not conversion.serve, line
            assert not conversion.build, line
            assert f"ignored, because {expected}" in conversion.as_text() or expected in conversion.as_text(), line


@pytest.mark.parametrize(("known", "table"), [(SERVE_FLAGS, SERVE_REFUSED), (BUILD_FLAGS, BUILD_REFUSED)])
def test_flags_are_refused_by_name(known: Any, table: dict[str, str]) -> None:
    for line, says in table.items():
        with pytest.raises((ConfigError, InvalidArgumentError)) as error:
            judge_flags(line.split(), known, ("--engine_dir", "--max_seq_len"))
        assert says in str(error.value), line


def _said(argument: str, known: Any) -> str:
    try:
        return judge_flags([argument], known, ()).conversion.as_text()
    except FaserError as error:
        return str(error)


def test_every_flag_has_an_outcome_for_any_value() -> None:
    """No flag is in a table with a rule that raises something else than one sentence."""
    for known in (SERVE_FLAGS, BUILD_FLAGS):
        for flag in known:
            for value in ("1", "true", "auto", "-3", "x: y", "[", ""):
                said = _said(f"{flag}={value}", known)
                assert said.startswith(flag)
                assert "\n" not in said


def test_what_is_no_flag_is_handed_back() -> None:
    assert judge_flags(["a", "--tp_size", "1", "--grpc", "b"], SERVE_FLAGS, ()).positional == ("a", "b")


def test_a_tokenizer_is_taken_if_it_is_the_models_own(tmp_path: Path) -> None:
    for name, text in (("target", "a"), ("same", "a"), ("other", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
    check_tokenizer({}, tmp_path / "target")
    check_tokenizer({"tokenizer": str(tmp_path / "same")}, tmp_path / "target")
    with pytest.raises(ConfigError, match="differs from that of"):
        check_tokenizer({"tokenizer": str(tmp_path / "other")}, tmp_path / "target")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json on this machine"):
        check_tokenizer({"tokenizer": "org/model"}, tmp_path / "target")


def faser(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "faser_trtllm.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_build_reads_a_configuration_and_flags_go_before_it(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "pair", num_layers=2)
    config = tmp_path / "trtllm.yaml"
    settings = {
        "model": str(target),
        "tokenizer": str(target),
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_seq_len": 80,
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": str(draft)},
    }
    config.write_text(yaml.safe_dump(settings))
    output = tmp_path / "engines"
    done = faser(
        *("build", "--config", config, "--output_dir", output, "--max_batch_size", 2),
        *("--speculative_decoding_mode", "draft_tokens_external", "--fast_build"),
    )
    assert done.returncode == 0, done.stderr
    assert "speculative_config.speculative_model: " in done.stderr
    assert "--fast_build: true  ignored, because" in done.stderr
    engines = EngineDir.load(output)
    built = engines.build_config
    assert (built.max_batch_size, built.max_num_tokens, built.max_seq_len, built.max_draft_len) == (2, 64, 80, 3)
    assert engines.has_draft
    own = json.loads((output / "target" / "config.json").read_text())
    again = convert(own)
    assert again.source == "engine_config"
    assert not again.refusals
    assert again.build["max_batch_size"] == 2


def test_serve_takes_a_configuration_under_its_flags(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "pair", num_layers=2)
    build_engines(
        BuildOptions(target, draft, tmp_path / "engines", max_batch_size=4, max_num_tokens=64, max_seq_len=80)
    )
    config = tmp_path / "trtllm.yaml"
    speculation = {"decoding_type": "Draft_Target", "max_draft_len": 3, "draft_len_schedule": {1: 3, 2: 1}}
    config.write_text(yaml.safe_dump({"max_batch_size": 4, "speculative_config": speculation, "backend": "pytorch"}))
    flags = judge_flags(["--max_batch_size", "2"], SERVE_FLAGS, ())
    options = ServeOptions(engine_dir=tmp_path / "engines", config=config, settings=flags.conversion.serve)
    with Launcher(options) as launcher:
        assert launcher.conversion is not None
        assert launcher.conversion.serve["max_batch_size"] == 4
        assert launcher._config.max_batch_size == 2
        assert launcher._config.speculation == "schedule:1=3,2=1"


def serve_options(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> ServeOptions:
    """Return the options that `faser serve` would launch with."""
    launched: list[ServeOptions] = []
    monkeypatch.setattr("faser_trtllm.serving.launch.launcher.serve", lambda options: launched.append(options) or 0)
    monkeypatch.setattr(sys, "argv", ["faser", "serve", *map(str, arguments)])
    with pytest.raises(SystemExit, match="0"):
        main()
    return launched[0]


def test_serve_is_called_as_trtllm_serve_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its subcommand, its short flag, and a directory that has the subcommand's name."""
    directory, config = tmp_path / "serve", tmp_path / "trtllm.yaml"
    for arguments in (
        ("serve", directory, "-c", config, "--port", 8010),
        (directory, "--config", config, "--http_port", 8010),
        ("serve", "--engine_dir", directory, "--extra_llm_api_options", config, "--port", 8010),
    ):
        options = serve_options(monkeypatch, *arguments)
        assert (options.engine_dir, options.config, options.http_port) == (directory, config, 8010), arguments
    monkeypatch.chdir(tmp_path)
    assert serve_options(monkeypatch, "serve").engine_dir == Path("serve")


def test_the_commands_refuse_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "trtllm.yaml"
    config.write_text("speculative_config: {decoding_type: MTP, max_draft_len: 3, speculative_model: x}")
    for arguments in (
        ("serve", "--engine_dir", tmp_path, "--config", config),
        ("build", "--output_dir", tmp_path / "out", "--config", config),
        ("serve", "--engine_dir", tmp_path, "--tp_size", 2),
        ("serve", tmp_path, tmp_path),
        ("serve", "serve", tmp_path, tmp_path),
        ("build", "--output_dir", tmp_path / "out"),
    ):
        monkeypatch.setattr(sys, "argv", ["faser", *map(str, arguments)])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert len(capsys.readouterr().err.splitlines()) == 1, arguments


def test_convert_reports_and_writes_what_serve_would_read(tmp_path: Path) -> None:
    config, output = tmp_path / "trtllm.yaml", tmp_path / "faser.yaml"
    config.write_text("model: x\nmax_batch_size: 4\nkv_cache_config: {enable_block_reuse: false}\n")
    done = faser("convert", "--config", config, "--json", "--output", output)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [entry["key"] for entry in report["keys"]] == [
        "model",
        "max_batch_size",
        "kv_cache_config.enable_block_reuse",
    ]
    assert yaml.safe_load(output.read_text()) == {"max_batch_size": 4, "kv_cache_config": {"enable_block_reuse": False}}
    config.write_text("model: x\nmax_beam_width: 4\nenable_lora: true\n")
    done = faser("convert", "--config", config)
    assert done.returncode == 2
    assert done.stdout.count("refused: ") == 2
