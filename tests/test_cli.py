"""Commands as a user types them, in a process of their own where exit codes and stderr matter."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.cli import main
from faser_trtllm.commands.benches import bench
from faser_trtllm.commands.generate import read_prompts
from faser_trtllm.commands.table import COMMANDS, import_command
from faser_trtllm.errors import FaserError
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import make_pair
from tests.support.gguf_writer import TYPE_F16, write_gguf
from tests.support.networks import load_trt

load_trt()
PROMPT = "and then"
PEERS = ("--checkpoint_dir", "a", "--draft_checkpoint_dir", "b", "--output_dir", "c")
Done = subprocess.CompletedProcess[str]


def faser(*arguments: object, **options: Any) -> Done:
    command = [sys.executable, "-m", "faser_trtllm.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.fixture
def faser_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Return a function like faser() that runs in this process, which has imported all there is to import."""

    def run(*arguments: object) -> Done:
        command = ["faser", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return Done(command, caught.value.code, *capsys.readouterr())

    return run


def one_sentence(done: Done) -> str:
    """Return the one line on stderr of a command that refused, with exit code 2."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "interpreting the TensorRT networks" not in line]
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


@pytest.fixture
def refused(faser_here: Callable[..., Done]) -> Callable[..., str]:
    return lambda *arguments: one_sentence(faser_here(*arguments))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), num_layers=3)


@pytest.fixture(scope="module")
def engine_dirs(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory per backend, built by the command."""
    root = tmp_path_factory.mktemp("engines")
    sizes = ("--max_batch_size", 3, "--max_num_tokens", 64, "--max_seq_len", 80, "--exit_layers", 2)
    for name, more in {"cpu": (), "tensorrt_rtx": ("--dtype", "float32")}.items():
        done = faser(
            *("build", "--checkpoint_dir", pair[0], "--draft_checkpoint_dir", pair[1], "--output_dir", root / name),
            *("--backend", name, *sizes, *more),
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[0] == f"built {root / name}"
    return {name: root / name for name in ("cpu", "tensorrt_rtx")}


def test_only_a_line_feed_ends_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('x\fy\n\n"a\u2028\\nb"\n')
    assert read_prompts(None, path) == ["x\fy", "a\u2028\nb"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    function = import_command(name)[1]
    assert function.__doc__ is not None
    assert function.__doc__.splitlines()[0] == COMMANDS[name].help


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["bench", "--help"]])
def test_quick_commands_import_little(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from faser_trtllm.cli import main\n"
        f"sys.argv = ['faser', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'numpy', 'pydantic', 'yaml', 'typer', 'rich', 'faser_trtllm.config', 'faser_trtllm.engine'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_lists_every_command_and_fits_a_terminal(faser_here: Callable[..., Done]) -> None:
    benches = {path.parent.name for path in Path().glob("benchmarks/*/__main__.py")} | {"serve", "replay.day"}
    for group, names in (("", set(COMMANDS)), ("bench", benches)):
        done = faser_here(*group.split(), "--help")
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        assert max(map(len, lines)) <= 80
        listed = {line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")}
        assert names <= listed


def test_what_is_no_command_is_named(refused: Callable[..., str], faser_here: Callable[..., Done]) -> None:
    assert refused("bild") == "faser: there is no command 'bild'; `faser --help` lists the commands"
    assert "no command 'bench speed'" in refused("bench", "speed")
    assert "no option '--bild'" in refused("--bild")
    nothing = faser_here()
    assert nothing.returncode == 2
    assert "Commands:" in nothing.stdout
    assert faser_here("version", "loud").returncode == 2


def test_benchmarks_outside_a_checkout_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FaserError, match=r"^bench 'peers' is not part of the installed package; clone the repository"):
        bench(["peers"], tmp_path)


def test_benchmarks_are_found_from_any_directory(tmp_path: Path) -> None:
    """The console script runs them without the repository on sys.path, too. Their child processes find them as well."""
    code = (
        "import subprocess, sys\n"
        "from faser_trtllm.commands.benches import bench\n"
        "assert bench(['golden']) == 0\n"
        "subprocess.run([sys.executable, '-c', 'import benchmarks.policies.options'], check=True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "synthetic_acceptance: [" in done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "the following arguments are required: --checkpoint_dir, --draft_checkpoint_dir, --output_dir"),
        ((*PEERS, "--bild"), "unrecognized arguments: --bild"),
        ((*PEERS, "--rounds", "x"), "argument --rounds: invalid int value: 'x'"),
        ((*PEERS, "--expand", "1,x"), "argument --expand: is '1,x'; it must be whole numbers as in 2,4"),
        ((*PEERS, "--expand", ","), "expand is empty, give at least one"),
        ((*PEERS, "--peers", "none", "--batch_sizes", "3", "--quick"), "num_prompts is 4; it must be a multiple of"),
    ],
)
def test_bad_flags_of_a_bench_are_named(refused: Callable[..., str], flags: tuple[str, ...], says: str) -> None:
    assert refused("bench", "peers", *flags).startswith(f"faser: {says}")


def test_check_explains_a_tensorrt_directory(engine_dirs: dict[str, Path]) -> None:
    done = faser("check", "--engine_dir", engine_dirs["tensorrt_rtx"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok: every file has the size and hash of the manifest")
    assert lines[1].startswith("note: texts end with ")
    assert lines[2] == "needs: an NVIDIA GPU of compute capability 8.0, 8.6, 8.9, 12.0 or newer, tensorrt_rtx 1.7.1.116"
    assert "3 requests, 64 rows in a pass, 80 tokens in a request, 8 drafts, KV blocks of 80 tokens" in lines[3]
    text = done.stdout
    for part in (
        "target: float32, 2 segment(s), ",
        "  layers 0 to 1: ",
        "  layers 2 to 2: ",
        "native attention, no plugins, network ",
        "  the early exit: ",
        "k_cache_{0..1} float32 [batch, 2, 80, 16]",
        "logits float32 [logit_rows, 320]",
        "scores float32 [exit_rows, 8]",
        "  profile 0: rows 1 to 64",
        "draft: float32, 1 segment(s), ",
    ):
        assert part in text, part
    assert lines[-1].startswith("note: nothing was run")


def test_check_names_damage(engine_dirs: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", engine_dirs["tensorrt_rtx"], copy], check=True)
    path = copy / "draft" / "rank0.engine"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    done = faser("check", "--engine_dir", copy)
    assert done.returncode == 2
    assert "draft/rank0.engine" in done.stderr
    assert "rebuild it with faser build" in done.stderr


def test_interpreting_gives_the_cpu_engines_greedy_tokens(
    engine_dirs: dict[str, Path], pair: tuple[Path, Path], faser_here: Callable[..., Done]
) -> None:
    """All of them are the torch reference's; the CPU engine's as far as no two logits are as near as its rounding."""
    answers = {}
    for name, more in {
        "cpu": (),
        "tensorrt_rtx": ("--interpret", "--checkpoint_dir", pair[0], "--draft_checkpoint_dir", pair[1]),
    }.items():
        for speculation in ("off", "fixed:3"):
            done = faser_here(
                *("generate", "--engine_dir", engine_dirs[name], "--prompt", PROMPT, "--max_tokens", 8),
                *("--temperature", 0, "--speculation", speculation, "--json", *more),
            )
            assert done.returncode == 0, done.stderr
            answers[name, speculation] = json.loads(done.stdout)
            assert ("interpreting the TensorRT networks on the CPU, which is slow" in done.stderr) == bool(more)
    prompt = Tokenizer.load(pair[0]).encode(PROMPT)
    tokens = answers["tensorrt_rtx", "off"]["token_ids"]
    with CheckpointWeights(pair[0]) as weights:
        reference = ReferenceModel(load_model_config(pair[0]), weights)
    logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == tokens
    assert answers["tensorrt_rtx", "fixed:3"]["token_ids"] == tokens
    assert answers["tensorrt_rtx", "fixed:3"]["num_draft_tokens"] > 0
    best = logits.topk(2).values
    unclear = (best[:, 0] - best[:, 1] < 0.1 * logits.std()).tolist()
    num_clear = unclear.index(True) if True in unclear else len(tokens)
    assert num_clear >= 6
    for speculation in ("off", "fixed:3"):
        assert answers["cpu", speculation]["token_ids"][:num_clear] == tokens[:num_clear]


def test_what_cannot_be_interpreted_is_named(
    engine_dirs: dict[str, Path], pair: tuple[Path, Path], refused: Callable[..., str]
) -> None:
    target, draft = pair
    generate = ("generate", "--prompt", "x", "--engine_dir")
    rtx, cpu = engine_dirs["tensorrt_rtx"], engine_dirs["cpu"]
    assert "checkpoint_dir is missing; --interpret needs" in refused(*generate, rtx, "--interpret")
    assert "draft_checkpoint_dir is missing" in refused(*generate, rtx, "--interpret", "--checkpoint_dir", target)
    for flag in ("checkpoint_dir", "draft_checkpoint_dir"):
        sentence = f"{flag} is {target}, which only --interpret reads; add --interpret or leave {flag} out"
        assert sentence in refused(*generate, rtx, f"--{flag}", target)
    assert "can be interpreted" in refused(*generate, cpu, "--interpret", "--checkpoint_dir", target)
    other = refused(*generate, rtx, "--interpret", "--checkpoint_dir", draft, "--speculation", "off")
    assert "exit_layers has 2" in other or "is not the one that" in other
    swapped = refused(*generate, rtx, "--interpret", "--checkpoint_dir", target, "--draft_checkpoint_dir", target)
    assert "of the draft checkpoint" in swapped
    assert "is not the one that" in swapped


@pytest.mark.parametrize("command", [("check",), ("generate", "--prompt", "x")])
def test_no_directory_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    assert "build one with faser build" in one_sentence(faser(*command, "--engine_dir", tmp_path))


def test_bytes_that_are_no_utf_8_are_named(engine_dirs: dict[str, Path], refused: Callable[..., str]) -> None:
    generate = ("generate", "--engine_dir", engine_dirs["cpu"])
    bad = b"ab\xff\xfe".decode(errors="surrogateescape")  # as a process gets them from its command line
    says = r"is 'ab\udcff\udcfe', whose character 3 is not valid UTF-8; "
    assert refused(*generate, "--prompt", bad).startswith(f"faser: prompt {says}")
    assert refused(*generate, "--prompt", "x", "--stop_words", bad).startswith(f"faser: stop_words {says}")
    assert refused(*generate, "--prompt", "x", "--guided_regex", bad).startswith(f"faser: guided_regex {says}")


def test_guides_are_called_as_their_flags(engine_dirs: dict[str, Path], refused: Callable[..., str]) -> None:
    generate = ("generate", "--engine_dir", engine_dirs["cpu"], "--prompt", "x")
    says = refused(*generate, "--guided_json", '{"a": ]}')
    assert says.startswith("faser: guided_json is not a valid json_schema: ")
    assert "column 7" in says
    assert refused(*generate, "--guided_regex", "(").startswith("faser: guided_regex is not a valid regex: ")


def test_a_trace_that_cannot_be_written_is_named(
    engine_dirs: dict[str, Path], refused: Callable[..., str], faser_here: Callable[..., Done]
) -> None:
    generate = ("generate", "--engine_dir", engine_dirs["cpu"], "--prompt", "x", "--max_tokens", 4, "--trace")
    says = refused(*generate, "/nowhere/t.json")
    assert says.startswith("faser: trace is /nowhere/t.json, which cannot be written: No such file or directory; ")
    assert faser_here(*generate, "/dev/full").returncode == 0


def test_a_full_disk_is_a_sentence(
    engine_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    generate = ("generate", "--engine_dir", engine_dirs["cpu"], "--prompt", "x", "--max_tokens", 4)
    with open("/dev/full", "w") as full:
        for arguments in (("version",), ("--help",), generate):
            command = [sys.executable, "-m", "faser_trtllm.cli", *map(str, arguments)]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
            assert done.returncode == 2
            assert [line for line in done.stderr.splitlines() if line.startswith("faser:")] == [
                "faser: standard output or another file is on a full disk (No space left on device); free space or "
                "write elsewhere"
            ]
            assert "Traceback" not in done.stderr

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("faser_trtllm.profiling.profile.write_json", fail)
    monkeypatch.setattr("faser_trtllm.profiling.profile.QUICK_BUDGET_S", 0.05)
    engines = engine_dirs["cpu"]
    assert refused("profile", "--quick", "--engine_dir", engines) == (
        f"faser: the profile in {engines} cannot be written: No space left on device; free space or permit it"
    )


def test_bad_build_flags_are_named(pair: tuple[Path, Path], tmp_path: Path, refused: Callable[..., str]) -> None:
    build = ("build", "--checkpoint_dir", pair[0], "--output_dir", tmp_path / "engines")
    assert "exit_layers is '1,x'; it must be whole numbers as in 2,4" in refused(*build, "--exit_layers", "1,x")
    rtx = (*build, "--backend", "tensorrt_rtx")
    assert "compute_capability has 1.0, tensorrt_rtx" in refused(*rtx, "--compute_capability", "8.6, 1.0")
    assert not (tmp_path / "engines").exists()


def test_a_dry_run_writes_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    done = faser(
        *("build", "--checkpoint_dir", pair[0], "--output_dir", tmp_path / "engines"),
        *("--backend", "tensorrt_rtx", "--dry_run"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("checked ")
    assert not list(tmp_path.iterdir())


def test_a_gguf_file_is_text_in_two_commands(
    pair: tuple[Path, Path], tmp_path: Path, faser_here: Callable[..., Done], refused: Callable[..., str]
) -> None:
    file = write_gguf(tmp_path / "model.gguf", pair[0], TYPE_F16)
    texts = []
    for number, path in enumerate((file, pair[0])):
        output = tmp_path / f"engines{number}"
        built = faser_here("build", "--checkpoint_dir", path, "--output_dir", output, "--max_seq_len", 64)
        assert built.returncode == 0, built.stderr
        assert ("target: F16 weights become bfloat16" in built.stderr) == (path == file)
        done = faser_here("generate", "--engine_dir", output, "--prompt", PROMPT, "--max_tokens", 16, "--json")
        texts.append(json.loads(done.stdout)["text"])
    assert texts[0] == texts[1] != ""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-1000])
    sentence = refused("build", "--checkpoint_dir", cut, "--output_dir", tmp_path / "x")
    assert sentence.startswith("faser: cut.gguf: ")
    assert "truncated or damaged; fetch it again" in sentence


def test_without_a_gpu_it_is_said(engine_dirs: dict[str, Path], refused: Callable[..., str]) -> None:
    try:
        from faser_trtllm.ops.cuda.driver import device_arch

        device_arch()
    except Exception:
        sentence = refused("generate", "--prompt", "x", "--engine_dir", engine_dirs["tensorrt_rtx"])
        assert "which run on an NVIDIA GPU, and " in sentence
        assert "faser generate --interpret" in sentence
    else:
        pytest.skip("there is a GPU")
