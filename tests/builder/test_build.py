from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from faser_trtllm import __version__
from faser_trtllm.builder import build, engine_file, source
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.builder.engine_file import EngineFile
from faser_trtllm.builder.options import DEFAULT_DRAFT_LEN
from faser_trtllm.errors import CheckpointError, EngineFileError, FaserError, InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import CheckpointWeights
from faser_trtllm.serving.launch.check import check_engine_dir
from tests.support.checkpoints import make_checkpoint, make_pair, write_tokenizer
from tests.support.packed_weights import unpack_matrix


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    target, draft = make_pair(tmp_path / "checkpoints", num_layers=4)
    return BuildOptions(target, draft, tmp_path / "engines")


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and content of every file, hidden ones included."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): (path.stat().st_ino, path.read_bytes()) for path in files}


def assert_nothing_left(options: BuildOptions) -> None:
    assert sorted(path.name for path in options.output_dir.parent.iterdir()) == ["checkpoints"]


def test_a_built_directory_has_all_that_serving_needs(options: BuildOptions) -> None:
    steps: list[tuple[str, int, int]] = []
    engines = build_engines(dataclasses.replace(options, exit_layers=(3, 1)), lambda *step: steps.append(step))
    assert engines == EngineDir.load(options.output_dir, verify_hashes=True)
    assert engines.build_config == BuildConfig(32, 2048, 512, 8, 32)
    assert engines.has_draft
    assert engines.vocab_size == 320
    assert engines.kv_bytes_per_token() == (4 + 1) * 2 * 2 * 16 * 2
    tokenizer = Tokenizer.load(engines.tokenizer_dir)
    assert tokenizer.first_difference(Tokenizer.load(options.checkpoint_dir)) is None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (0,))
    with EngineFile.open(engines.target_path) as target, EngineFile.open(engines.draft_path) as draft:
        assert target.header["segments"] == [0, 1, 3, 4]
        assert draft.header["segments"] == [0, 1]
        assert len(steps) == len(target.header["tensors"]) + len(draft.header["tensors"])
    last = {role: (done, total) for role, done, total in steps}
    assert all(done == total for done, total in last.values())
    config = engines.target_config
    assert {"version", "pretrained_config", "build_config", "faser"} == config.keys()
    assert config["pretrained_config"]["num_hidden_layers"] == 4


def test_without_a_draft(options: BuildOptions) -> None:
    engines = build_engines(dataclasses.replace(options, draft_checkpoint_dir=None))
    assert engines is not None
    assert not engines.has_draft
    assert engines.build_config.max_draft_len == DEFAULT_DRAFT_LEN  # for drafts of the text itself
    assert not (options.output_dir / "draft").exists()
    with pytest.raises(ValueError, match="no draft"):
        _ = engines.draft_path


def test_expansion_multiplies_the_target_only(options: BuildOptions) -> None:
    engines = build_engines(dataclasses.replace(options, expand=3, exit_layers=(11,)))
    assert engines is not None
    with EngineFile.open(engines.target_path) as target, EngineFile.open(engines.draft_path) as draft:
        assert target.header["model"]["num_layers"] == 12
        assert draft.header["model"]["num_layers"] == 1
        assert target.array("layers.3.o", "u4").any()
        assert not target.array("layers.4.o", "u4").any()
        assert (target.array("layers.4.qkv", "u4") == target.array("layers.3.qkv", "u4")).all()


def test_the_same_build_is_done_once(options: BuildOptions) -> None:
    build_engines(options)
    before = snapshot(options.output_dir)
    build_engines(options)
    assert snapshot(options.output_dir) == before
    # Another copy of the same checkpoint has other inodes and times but the same contents.
    copy = options.checkpoint_dir.parent / "copy"
    shutil.copytree(options.checkpoint_dir, copy, copy_function=shutil.copyfile)
    build_engines(dataclasses.replace(options, checkpoint_dir=copy))
    assert snapshot(options.output_dir) == before
    build_engines(dataclasses.replace(options, force=True))
    assert snapshot(options.output_dir) != before


@pytest.mark.parametrize("change", ["weights", "tokenizer", "options", "damage", "draft"])
def test_what_changed_is_built_again(options: BuildOptions, change: str) -> None:
    build_engines(options)
    before = snapshot(options.output_dir)
    if change == "weights":
        make_checkpoint(options.checkpoint_dir, num_layers=4, seed=5)
    elif change == "tokenizer":
        for directory in (options.checkpoint_dir, options.draft_checkpoint_dir):
            assert directory is not None
            write_tokenizer(directory, 300)
    elif change == "options":
        options = dataclasses.replace(options, max_draft_len=5)
    elif change == "damage":
        (options.output_dir / "draft" / "rank0.engine").write_bytes(b"")
    else:
        options = dataclasses.replace(options, draft_checkpoint_dir=None)
    build_engines(options)
    after = snapshot(options.output_dir)
    assert after["target/rank0.engine"][0] != before["target/rank0.engine"][0]
    EngineDir.load(options.output_dir, verify_hashes=True)


def test_engines_of_another_release_open_and_are_built_again(options: BuildOptions) -> None:
    """Only the formats of the files decide what opens; each has a version of its own."""
    build_engines(options)
    manifest = options.output_dir / "manifest.json"
    entries = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(entries | {"faser_version": "0.1.0"}))
    assert EngineDir.load(options.output_dir, verify_hashes=True).manifest["faser_version"] == "0.1.0"
    built = build_engines(options)
    assert built is not None
    assert built.manifest["faser_version"] == __version__


def test_a_dry_run_checks_all_and_writes_nothing(options: BuildOptions) -> None:
    assert build_engines(dataclasses.replace(options, dry_run=True)) is None
    assert_nothing_left(options)
    assert options.draft_checkpoint_dir is not None
    make_checkpoint(options.draft_checkpoint_dir, vocab_size=180)
    with pytest.raises(CheckpointError, match="target and draft have different tokenizers"):
        build_engines(dataclasses.replace(options, dry_run=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "opencl"}, "backend opencl is unknown; use cpu or cuda or tensorrt_rtx or tensorrt"),
        ({"backend": "cuda", "dtype": "float32"}, "dtype is float32, the cuda backend builds bfloat16 or float16"),
        ({"backend": "cuda"}, "head_dim is 16 in the target checkpoint, the CUDA kernels have 64, 80, 96, 128, 256"),
        ({"dtype": "float16"}, "dtype is float16, the cpu backend builds bfloat16"),
        ({"compute_capabilities": ("8.6",)}, "compute_capability is 8.6, but only the tensorrt_rtx backend"),
        (
            {"backend": "tensorrt_rtx", "quantization": "int8"},
            "int8, which",
        ),
        ({"draft_quantization": "int3"}, "draft_quantization is int3; it must be none, int8 (W8A16)"),
        (
            {"backend": "cuda", "draft_quantization": "int4"},
            "draft_quantization is int4:32, which cuda engines do not hold; leave it out or use --backend cpu",
        ),
        ({"quantization": "fp9"}, "quantization is fp9; it must be none, int8 (W8A16)"),
        ({"quantization": "fp8"}, "FP8, only tensorrt_rtx or tensorrt engines are built in it, not those of cpu; use"),
        ({"draft_quantization": "FP8"}, "are built in it, not those of cpu; use int8 or W8A8"),
        (
            {"backend": "cuda", "quantization": "FP8"},
            "not those of cuda; leave it out and set quantization to fp8 in faser.yaml",
        ),
        (
            {"backend": "tensorrt_rtx", "draft_quantization": "FP8", "draft_checkpoint_dir": None},
            "draft_quantization is FP8 without a draft",
        ),
        (
            {"backend": "tensorrt_rtx", "quantization": "FP8", "quantize_lm_head": True},
            "quantize_lm_head is set with quantization FP8, where LM heads stay in bfloat16; leave it out",
        ),
        ({"calib_dataset": Path("text")}, "calib_dataset is text without a quantization that calibrates; add"),
        (
            {"draft_quantization": "int4:128"},
            "draft is int4:128, but its hidden_size is 64, no multiple of 128; use int4",
        ),
        ({"draft_quantization": "int8", "draft_checkpoint_dir": None}, "draft_quantization is int8 without a draft"),
        ({"quantize_lm_head": True}, "quantize_lm_head is set without a quantization"),
        (
            {"quantization": "mxfp4"},
            "target is mxfp4, which quantizes only experts, and a LlamaForCausalLM has none; leave it out",
        ),
        ({"quantization": "mxfp4", "quantize_lm_head": True}, "mxfp4, which quantizes only experts; leave it out"),
        ({"max_batch_size": 0}, "max_batch_size is 0; it must be at least 1"),
        ({"max_num_tokens": 31}, "max_num_tokens is 31; it must be at least max_batch_size (32)"),
        ({"tokens_per_block": 24}, "tokens_per_block is 24; it must be a multiple of 16"),
        ({"max_draft_len": -1}, "max_draft_len is -1; it must be between 0 and"),
        (
            {"max_seq_len": 513},
            "it must be between 2 and 512, the target's max_position_embeddings with its rope scaling",
        ),
        ({"max_seq_len": 1}, "max_seq_len is 1"),
        ({"expand": 0}, "expand is 0"),
        ({"exit_layers": (4,)}, "exit_layers has 4, boundaries lie between 1 and 3"),
        ({"exit_layers": (2, 2)}, "names a layer twice"),
    ],
)
def test_bad_options_are_named(options: BuildOptions, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        build_engines(dataclasses.replace(options, **changes))
    assert message in str(caught.value)
    assert_nothing_left(options)


def test_target_and_draft_must_speak_of_the_same_tokens(options: BuildOptions) -> None:
    assert options.draft_checkpoint_dir is not None
    write_tokenizer(options.draft_checkpoint_dir, 270)
    with pytest.raises(CheckpointError, match=r"id 270 is '.*' in the target and no token in the draft\), .* 84.38 %"):
        build_engines(options)
    (options.draft_checkpoint_dir / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        build_engines(options)
    assert_nothing_left(options)


@pytest.mark.parametrize("vocab_size", [384, 300])
def test_a_draft_padded_otherwise_is_brought_to_the_targets_vocab_size(options: BuildOptions, vocab_size: int) -> None:
    assert options.draft_checkpoint_dir is not None
    make_checkpoint(options.draft_checkpoint_dir, vocab_size=vocab_size, tokenizer_vocab_size=290)
    write_tokenizer(options.checkpoint_dir, 290)
    engines = build_engines(options)
    assert engines is not None
    with (
        EngineFile.open(engines.draft_path) as draft,
        CheckpointWeights(options.draft_checkpoint_dir) as weights,
    ):
        assert draft.header["model"]["vocab_size"] == 320
        packed = draft.array("lm_head", np.uint32).reshape(5, -1, 64)
        head = unpack_matrix(packed, 320, 64)
        embedding = draft.array("embedding", np.uint16).reshape(320, 64)
        for name, rows in (("lm_head", head), ("model.embed_tokens", embedding)):
            theirs = weights.bfloat16(f"{name}.weight", (vocab_size, 64))
            common = min(vocab_size, 320)
            np.testing.assert_array_equal(rows[:common], theirs[:common])
            assert (rows[common:] == theirs[-1]).all()


def test_memory_holds_a_few_tensors_at_most(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "checkpoint", hidden_size=256, num_layers=16, dtype="float32")
    largest = 2 * 384 * 256 * 2  # gate and up, packed
    tracemalloc.start()
    try:
        engines = build_engines(BuildOptions(directory, None, tmp_path / "engines"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert engines is not None
    assert engines.target_path.stat().st_size > 30 * largest
    assert peak < 10 * largest


def test_unusable_checkpoints_leave_no_trace(options: BuildOptions) -> None:
    with pytest.raises(CheckpointError, match=r"the target checkpoint .* does not exist or cannot be read"):
        build_engines(dataclasses.replace(options, checkpoint_dir=options.checkpoint_dir / "absent"))
    weights = options.checkpoint_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="are a truncated or damaged safetensors file"):
        build_engines(options)
    assert_nothing_left(options)


def test_foreign_directories_are_not_replaced(options: BuildOptions) -> None:
    options.output_dir.mkdir()
    (options.output_dir / "thesis.tex").write_text("years of work")
    with pytest.raises(EngineFileError, match=r"holds other things than engines \(no manifest\.json\)"):
        build_engines(options)
    assert (options.output_dir / "thesis.tex").read_text() == "years of work"
    build_engines(dataclasses.replace(options, force=True))
    assert not (options.output_dir / "thesis.tex").exists()


def test_force_never_removes_the_checkpoint(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    for output in (options.checkpoint_dir, options.checkpoint_dir.parent):
        with pytest.raises(InvalidArgumentError, match="would replace"):
            build_engines(dataclasses.replace(options, output_dir=output, force=True))
    monkeypatch.chdir(options.checkpoint_dir.parent.parent)
    with pytest.raises(InvalidArgumentError, match="would replace"):
        build_engines(dataclasses.replace(options, output_dir=Path(), force=True))


def test_a_file_in_the_way(options: BuildOptions) -> None:
    options.output_dir.write_text("")
    with pytest.raises(EngineFileError, match="is a file"):
        build_engines(options)
    under = dataclasses.replace(options, output_dir=options.output_dir / "engines")
    with pytest.raises(EngineFileError, match=r"cannot be written: (Not a directory|File exists)"):
        build_engines(under)


@pytest.mark.parametrize("changes", [{}, {"force": True}, {"dry_run": True}], ids=str)
def test_a_mount_point_is_refused_before_any_work(
    options: BuildOptions, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished engines are renamed to output_dir, which no mount point allows."""
    options.output_dir.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == options.output_dir)
    monkeypatch.setattr(build, "_manifest", lambda *_: pytest.fail("it went on"))
    with pytest.raises(EngineFileError) as caught:
        build_engines(dataclasses.replace(options, **changes))
    assert str(caught.value) == (
        f"output_dir {options.output_dir} is a mount point, which cannot be replaced; name a folder inside it"
    )


def test_a_folder_on_a_mounted_volume_is_built(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == options.output_dir.parent)
    assert build_engines(options) is not None


def test_a_full_disk_keeps_the_old_engines(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    build_engines(options)
    before = snapshot(options.output_dir.parent)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)  # of the tokenizer, when the engines are written
    with pytest.raises(EngineFileError, match="on a full disk"):
        build_engines(dataclasses.replace(options, max_draft_len=4))
    assert snapshot(options.output_dir.parent) == before
    EngineDir.load(options.output_dir, verify_hashes=True)


def test_too_little_space_is_noticed_before_writing(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: Usage)
    monkeypatch.setattr(engine_file, "write_engine_file", lambda *_: pytest.fail("written all the same"))
    with pytest.raises(EngineFileError, match="on a full disk"):
        build_engines(options)
    assert_nothing_left(options)


def test_a_killed_build_is_never_accepted(options: BuildOptions) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from faser_trtllm.builder.build import BuildOptions, build_engines\n"
        "def progress(role, done, total):\n"
        "    if role == 'draft' and done == total - 1:\n"
        "        print('midway', flush=True)\n"
        "        time.sleep(60)\n"
        "build_engines(BuildOptions(*map(Path, sys.argv[1:])), progress)\n"
    )
    paths = [options.checkpoint_dir, options.draft_checkpoint_dir, options.output_dir]
    root = str(Path(build.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, paths)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "midway\n"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    leftovers = [path for path in options.output_dir.parent.iterdir() if path.name != "checkpoints"]
    assert len(leftovers) == 1
    assert leftovers[0].name.startswith(".engines.")
    with pytest.raises(EngineFileError, match="build one with faser build"):
        EngineDir.load(options.output_dir)
    with pytest.raises(EngineFileError, match="build one with faser build"):
        EngineDir.load(leftovers[0])
    build_engines(options)
    EngineDir.load(options.output_dir, verify_hashes=True)
    assert not leftovers[0].exists()
    # Those of a rebuild that was killed, also by a process of a container with the id of this one, where nothing is
    # to be built any more.
    for pid in (process.pid, os.getpid()):
        leftovers[0].with_name(f".engines.{pid}.0123abcd.building").mkdir()
    build_engines(options)
    assert [path.name for path in options.output_dir.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_checkpoint_that_changes_meanwhile_is_not_built(options: BuildOptions, name: str) -> None:
    """The engines would have the weights of one file and the manifest the hash of another, up to date for ever."""

    def progress(role: str, done: int, total: int) -> None:
        if role == "target" and done == total:
            path = options.checkpoint_dir / name
            shutil.copy(path, path.with_name("new"))
            path.with_name("new").replace(path)

    with pytest.raises(
        CheckpointError, match=rf"{name} of the target changed while engines were built from it; build ag"
    ):
        build_engines(options, progress)
    assert_nothing_left(options)
    build_engines(options)


def test_interrupted_builds_clean_up(options: BuildOptions) -> None:
    def progress(role: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engines(options, progress)
    assert_nothing_left(options)


@pytest.mark.parametrize(
    "file", ["target/rank0.engine", "draft/config.json", "tokenizer.json", "generation_config.json"]
)
def test_files_that_do_not_fit_the_manifest_are_named(options: BuildOptions, file: str) -> None:
    build_engines(options)
    path = options.output_dir / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(
        EngineFileError, match=f"{file} in .* has {len(whole) - 1} bytes, the manifest says {len(whole)}"
    ):
        EngineDir.load(options.output_dir)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EngineFileError, match=f"{file} in .* has sha256"):
        EngineDir.load(options.output_dir, verify_hashes=True)
    path.unlink()
    with pytest.raises(EngineFileError, match=f"{file} cannot be read in .*: No such file"):
        EngineDir.load(options.output_dir)


@pytest.mark.parametrize(
    "damage",
    [
        lambda manifest: "{",
        lambda manifest: "[]",
        lambda manifest: json.dumps(manifest | {"format": 2}),
        lambda manifest: json.dumps(manifest | {"files": []}),
        lambda manifest: json.dumps(manifest | {"files": {"tokenizer.json": {}}}),
        lambda manifest: json.dumps({key: value for key, value in manifest.items() if key != "checkpoints"}),
    ],
)
def test_damaged_manifests_are_refused(options: BuildOptions, damage: Any) -> None:
    build_engines(options)
    path = options.output_dir / "manifest.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(EngineFileError, match=r"manifest\.json in .*faser build") as caught:
        EngineDir.load(options.output_dir)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, FaserError)


def test_recognizing_a_finished_build_does_not_read_the_weights(
    options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_engines(options)
    monkeypatch.setattr(source, "sha256_of", lambda path: pytest.fail(f"{path} read again"))
    build_engines(options, lambda *step: pytest.fail("built again"))


@pytest.mark.parametrize("max_seq_len", [None, 300])
def test_the_window_of_a_draft_model_does_not_cut_the_targets(options: BuildOptions, max_seq_len: int | None) -> None:
    assert options.draft_checkpoint_dir is not None
    make_checkpoint(options.draft_checkpoint_dir, num_layers=1, max_position_embeddings=128)
    lines: list[str] = []
    engines = build_engines(dataclasses.replace(options, max_seq_len=max_seq_len), note=lines.append)
    assert engines is not None
    assert (engines.build_config.max_seq_len, engines.draft_window) == (max_seq_len or 512, 128)
    assert lines == [f"draft: it drafts within its 128 tokens only, max_seq_len is {max_seq_len or 512}"]


def test_rope_scaling_lets_both_models_take_longer_texts(options: BuildOptions) -> None:
    assert options.draft_checkpoint_dir is not None
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    make_checkpoint(options.checkpoint_dir, "qwen2", rope=yarn, max_position_embeddings=256)
    make_checkpoint(options.draft_checkpoint_dir, rope={"rope_type": "linear", "factor": 4.0}, num_layers=1)
    lines: list[str] = []
    engines = build_engines(dataclasses.replace(options, max_seq_len=1024), note=lines.append)
    assert engines is not None
    assert (engines.build_config.max_seq_len, engines.draft_window, lines) == (1024, 2048, [])
    with pytest.raises(InvalidArgumentError, match="max_seq_len is 1025; it must be between 2 and 1024"):
        build_engines(dataclasses.replace(options, max_seq_len=1025))


def test_texts_end_at_all_end_tokens_that_the_model_has(options: BuildOptions) -> None:
    """The build says which it has no row for, and so do engines: later readers of the directory leave it out, too."""
    for directory in (options.checkpoint_dir, options.draft_checkpoint_dir):
        assert directory is not None
        (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
        backend = Backend.from_file(str(directory / "tokenizer.json"))
        backend.add_special_tokens(["<|im_end|>"])
        (directory / "tokenizer.json").write_text(backend.to_str())
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    lines: list[str] = []
    engines = build_engines(options, note=lines.append)
    assert engines is not None
    assert lines == ["no text ends with '<|im_end|>' (320): the model's ids are 0 to 319"]
    assert Tokenizer.load(engines.tokenizer_dir, engines.vocab_size).eos_token_ids == (0, 7, 9)
    report = list(check_engine_dir(options.output_dir))
    assert report[1] == "note: texts end with '<|endoftext|>' (0), '&' (7), '(' (9)"
    (options.checkpoint_dir / "generation_config.json").write_text('{"eos_token_id": [7, 320]}')
    with pytest.raises(CheckpointError, match="eos_token_id is 320, the model's ids are 0 to 319"):
        build_engines(options)
