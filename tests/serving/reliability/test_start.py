"""Tests of what a service refuses to start with and what it survives: limits, full disks, clocks that jump."""

import ast
import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig, load_service_config
from faser_trtllm.errors import CheckpointError, ConfigError, EngineFileError, FaserError, UnavailableError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import ResponseError, generate_http
from faser_trtllm.serving.launch import limits
from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.launch.process import command_line, session_pids
from tests.support.effort import pick
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import FAKE_ENGINE, REPOSITORY, ROOT, free_ports
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_engine_dir(tmp_path_factory.mktemp("pair"), max_batch_size=2, max_seq_len=64, max_draft_len=2)


@pytest.fixture
def copy(built, tmp_path):
    """An engine directory to damage."""
    subprocess.run(["cp", "-r", built, tmp_path / "engine"], check=True)
    return tmp_path / "engine"


def refusal(**options):
    """The sentence with which `faser serve` refuses to start, before it starts a server."""
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(), strict=True))
    unwanted = mock.patch.object(Launcher, "_command", side_effect=AssertionError("a server would have been started"))
    with unwanted, pytest.raises(FaserError) as caught, Launcher(ServeOptions(**{**ports, **options})) as launcher:
        launcher.start()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "says"), [(1234, "has 1234 bytes, the manifest says"), (0, "has 0 bytes, the manifest says")]
)
def test_an_engine_file_that_was_cut_is_refused_before_a_server_is_started(copy, size, says):
    os.truncate(copy / "target" / "rank0.engine", size)
    sentence = refusal(engine_dir=copy)
    assert f"target/rank0.engine in {copy} {says}" in sentence
    assert "rebuild it with faser build" in sentence


def test_an_engine_file_with_the_wrong_beginning_is_refused(copy):
    path = copy / "target" / "rank0.engine"
    with path.open("r+b") as file:
        file.write(b"not an engine")
    with pytest.raises(EngineFileError, match=r"rank0\.engine.*(not|no) .*engine"):
        open_executor(copy, ExecutorConfig(speculation="off"))


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_a_hash_that_is_not_the_manifest_s_is_refused_by_faser_check_and_faser_serve(copy):
    change_a_byte(copy / "draft" / "rank0.engine")
    says = r"draft/rank0\.engine in .* has sha256 [0-9a-f]{12}, the manifest says [0-9a-f]{12}"
    with pytest.raises(EngineFileError, match=f"^{says}; rebuild it with faser build$"):
        EngineDir.load(copy, verify_hashes=True)
    assert re.match(f"{says}; rebuild it with faser build, or .* with --allow_hash_mismatch$", refusal(engine_dir=copy))
    change_a_byte(copy / "tokenizer.json")
    assert " (1 more files differ); " in refusal(engine_dir=copy)


def test_files_of_another_size_are_refused_whatever_hashes_are_allowed(copy):
    os.truncate(copy / "target" / "rank0.engine", 1234)
    assert "has 1234 bytes, the manifest says" in refusal(engine_dir=copy, allow_hash_mismatch=True)


@pytest.mark.triton
@pytest.mark.slow
def test_another_hash_is_served_with_a_warning_where_it_is_allowed(built, copy, capfd):
    """Another draft changes no token."""

    def serve(engine_dir, **options):
        ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(), strict=True))
        with Launcher(ServeOptions(engine_dir=engine_dir, **ports, **options)) as launcher:
            launcher.start()
            assert launcher.wait_ready()
            text = generate_http(f"http://127.0.0.1:{ports['http_port']}", "abc", max_tokens=8, end_id=-1).text
            launcher.stop()
        err = capfd.readouterr().err
        assert "CudaDriverHelper" not in err, "a normal start has no error"
        return text, [line for line in err.splitlines() if "sha256" in line]

    text, warnings = serve(built)
    assert warnings == []
    change_a_byte(copy / "draft" / "rank0.engine")
    allowed, warnings = serve(copy, allow_hash_mismatch=True)
    assert allowed == text
    assert len(warnings) == 1
    assert warnings[0].startswith(f"WARNING: draft/rank0.engine in {copy} has sha256 ")
    assert warnings[0].endswith("; served anyway (--allow_hash_mismatch)")


def test_a_directory_without_its_tokenizer_is_refused(copy):
    (copy / "tokenizer.json").unlink()
    says = f"tokenizer.json cannot be read in {copy}: No such file or directory;"
    assert says in refusal(engine_dir=copy)


def test_directories_that_cannot_be_read_say_why(built, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert f"manifest.json cannot be read in {loop} (Too many levels of symbolic links)" in refusal(engine_dir=loop)
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in refusal(engine_dir=tmp_path / "file")
    assert "No such file or directory" in refusal(engine_dir=tmp_path / "gone")
    assert f"model_repo {tmp_path / 'gone'} cannot be read: No such file or directory; " in refusal(
        engine_dir=built, model_repo=tmp_path / "gone"
    )

    def failing(read, name, code):
        def fail(path, *args, **kwargs):
            if path.name == name:
                raise OSError(code, os.strerror(code))
            return read(path, *args, **kwargs)

        return fail

    read_bytes, read_text = Path.read_bytes, Path.read_text

    for code in (errno.EACCES, errno.ESTALE, errno.EIO):  # no right to, a network file system that went away
        reason = os.strerror(code) + (", as uid 4711" if code == errno.EACCES else "")
        monkeypatch.setattr(Path, "read_bytes", failing(read_bytes, "manifest.json", code))
        says = f"manifest.json cannot be read in {built} ({reason})"
        assert says in refusal(engine_dir=built)
        monkeypatch.setattr(Path, "read_text", failing(read_text, "tokenizer.json", code))
        with pytest.raises(CheckpointError, match=f"cannot be read in {built}: {reason}$"):
            Tokenizer.load(built)


def test_an_unknown_key_of_the_configuration_gets_a_suggestion(tmp_path):
    path = tmp_path / "faser.yaml"
    path.write_text("kv_cache_config:\n  max_token: 100\n")
    with pytest.raises(
        ConfigError, match=r"unknown configuration key kv_cache_config\.max_token; did you mean max_tokens\?"
    ):
        load_service_config(path)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("max_batch_size: 9999", "max_batch_size is 9999, the engines were built for 2; lower it or rebuild with"),
        ("kv_cache_config: {max_tokens: 1}", "kv_cache_config.max_tokens is 1; it must hold at least one block of "),
        ("otlp_traces_endpoint: collector:4318", "otlp_traces_endpoint is 'collector:4318'; it must be the URL of"),
        ("trace_file: /nowhere/t.json", "trace_file is /nowhere/t.json, which cannot be written: No such file or"),
        ("cores: [4711]", "cores holds 4711, this process may use ["),
        ("quantization: fp8", "quantization is fp8, "),
        ("kv_cache_config: {dtype: fp8}", "kv_cache_config.dtype is fp8, "),
        ("gpu_partitions: streams", "gpu_partitions is streams, "),
        (
            "{num_branches: 2, synthetic_acceptance: 1.0}",
            "num_branches is 2, which needs cpu or cuda engines with a draft",
        ),
        (
            "{num_branches: 2, drafters: suffix}",
            "num_branches is 2, which needs cpu or cuda engines with a draft model",
        ),
        (
            "scheduler_config: {context_chunking_policy: EQUAL_PROGRESS}",
            "scheduler_config.context_chunking_policy is EQUAL_PROGRESS, the native scheduler has",
        ),
    ],
)
def test_settings_of_the_engine_are_checked_before_a_server_is_started(built, tmp_path, setting, says):
    path = tmp_path / "faser.yaml"
    path.write_text(setting)
    assert refusal(engine_dir=built, config=path).startswith(says)


def test_hosts_and_ports_are_told_apart(built):
    assert refusal(engine_dir=built, host="nohost.invalid", allow_vulnerable_triton=True).startswith(
        "host is nohost.invalid, which is no address of this machine ("
    )
    assert "; name one with --host" in refusal(engine_dir=built, host="192.0.2.1", allow_vulnerable_triton=True)
    assert refusal(engine_dir=built, http_port=4711, grpc_port=4711) == (
        "http_port and grpc_port are both 4711; take another with --grpc_port"
    )


@pytest.mark.parametrize("name", ["../faser", "/etc", "faser/../faser", ".."])
def test_a_model_name_that_leads_out_of_the_repository_is_refused(built, name):
    assert f"models has {name!r}, the model repository has " in refusal(engine_dir=built, models=(name,))


def test_a_wrong_fault_is_refused_before_a_server_is_started(built, monkeypatch):
    monkeypatch.setenv("FASER_FAULT", "draft_eror@step5")
    assert "FASER_FAULT has the kind 'draft_eror', known are draft_error, " in refusal(engine_dir=built)


def test_too_few_open_files_are_a_sentence_at_the_start(built, monkeypatch):
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (64, 64))
    assert "this process may open 64 files, at least 1024 are needed" in refusal(engine_dir=built)


@pytest.fixture
def few_files():
    """A soft limit of 64, as some service managers set it; the hard one is higher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.triton
@pytest.mark.slow
def test_a_low_soft_limit_of_files_and_a_full_log_disk_do_not_matter(fake_engine_dir, monkeypatch, few_files):
    """The server's messages go to /dev/full, and the engine is killed, so that there are some."""
    monkeypatch.setenv("FASER_ENGINE_MODULE", FAKE_ENGINE["FASER_ENGINE_MODULE"])
    ports = free_ports()
    options = ServeOptions(
        engine_dir=fake_engine_dir,
        http_port=ports[0],
        grpc_port=ports[1],
        metrics_port=ports[2],
        model_repo=REPOSITORY,
        log_file=Path("/dev/full"),
        verbose=True,
    )
    url = f"http://127.0.0.1:{ports[0]}"
    with Launcher(options) as launcher:
        launcher.start()
        assert launcher.wait_ready()
        assert re.search(r"Max open files +(\d+)", Path(f"/proc/{launcher.pid}/limits").read_text())[1] != "64"
        assert generate_http(url, "abc", max_tokens=3).text == "abcabc"
        (engine,) = (pid for pid in session_pids(launcher.pid) if pid != launcher.pid)
        os.kill(engine, signal.SIGKILL)

        def answers():
            with contextlib.suppress(ResponseError):
                return generate_http(url, "abc", max_tokens=3).text == "abcabc"

        wait_until(answers)
        launcher.stop()
        assert launcher.leftovers() == []


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("stage", [*pick([], ["at once"]), "while it loads"])
def test_an_engine_that_is_killed_while_it_starts_ends_the_start(fake_engine_dir, tmp_path, monkeypatch, stage):
    began = tmp_path / "began"
    (tmp_path / "slow_engine.py").write_text(f"import time\nopen({str(began)!r}, 'w').close()\ntime.sleep(600)\n")
    monkeypatch.setenv("FASER_ENGINE_MODULE", "slow_engine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(), strict=True))
    pids = []

    def engine():
        return next((pid for pid in session_pids(launcher.pid) if "slow_engine" in command_line(pid)), None)

    def kill_the_engine():
        if stage == "while it loads":
            wait_until(began.exists)
        wait_until(engine, poll_s=0.002)
        pids.extend(session_pids(launcher.pid))
        os.kill(engine(), signal.SIGKILL)

    options = ServeOptions(engine_dir=fake_engine_dir, model_repo=REPOSITORY, log_file=tmp_path / "log", **ports)
    with Launcher(options) as launcher:
        launcher.start()
        killer = threading.Thread(target=kill_the_engine)
        killer.start()
        with pytest.raises(UnavailableError, match=r"the server did not start \("):
            launcher.wait_ready()
        killer.join()
    assert "the engine process ended before it was ready" in (tmp_path / "log").read_text()
    assert len(pids) == 2
    wait_until(lambda: not any(command_line(pid) for pid in pids))
    assert launcher.leftovers() == []


@pytest.mark.triton
@pytest.mark.slow
def test_closed_output_does_not_end_the_service(fake_engine_dir):
    """The terminal is gone: nobody reads what the launcher and the server write."""
    ports = free_ports()
    code = (
        "import os, sys; from pathlib import Path; from faser_trtllm.serving.launch.launcher import serve; "
        "from faser_trtllm.serving.launch.options import ServeOptions\n"
        f"sys.exit(serve(ServeOptions(engine_dir=Path({str(fake_engine_dir)!r}), http_port={ports[0]}, "
        f"grpc_port={ports[1]}, metrics_port={ports[2]}, model_repo=Path({str(REPOSITORY)!r}))))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | FAKE_ENGINE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "ready:" in process.stdout.readline()
        process.stdout.close()
        process.stderr.close()
        url = f"http://127.0.0.1:{ports[0]}"
        for _ in range(3):
            with pytest.raises(ResponseError):
                generate_http(url, "abc", max_tokens=-1)
            assert generate_http(url, "abc", max_tokens=3).text == "abcabc"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def _modules_that_call(names):
    """Modules of the package with a call of one of these, spelled as there."""
    found = set()
    for path in (ROOT / "faser_trtllm").rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in names):
            calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
            found |= {str(path.relative_to(ROOT / "faser_trtllm"))} if calls & names else set()
    return found


def test_the_wall_clock_is_read_only_to_be_shown():
    """Deadlines, back-off and health go by the monotonic clock."""
    parts = ("core/", "engine/", "executor/", "kvcache/", "policy/", "scheduler/", "serving/")
    served = {path for path in _modules_that_call({"time.time", "time.time_ns"}) if path.startswith(parts)}
    shown = {
        "serving/engine_process/metrics.py",
        "serving/openai/app.py",
        "serving/openai/reply.py",
        "serving/openai/responses/reply.py",
        "serving/observe/spans.py",
    }
    assert served == shown


def test_no_process_is_forked_and_goes_on():
    """Children are new programs: none inherits the locks of our threads, nor a GPU's context. Only the program that
    compiles guides forks, and it has one thread (tests/guided/test_hostile_guides.py)."""
    assert _modules_that_call({"os.fork", "os.forkpty", "pty.fork"}) == {"guided/probe.py"}
    imported = r"^\s*(import multiprocessing|from multiprocessing(?!\.connection)|.*ProcessPoolExecutor)"
    pooled = re.compile(imported, re.MULTILINE)
    assert [path for path in (ROOT / "faser_trtllm").rglob("*.py") if pooled.search(path.read_text())] == []
