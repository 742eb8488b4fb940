"""The examples as a user runs them: one pair of engines, one Triton server and one OpenAI frontend for all of them."""

import json
import runpy
import subprocess
import sys
from typing import NamedTuple

import pytest
import yaml

from faser_trtllm.config import ServiceConfig, load_service_config
from faser_trtllm.serving.client import GrpcClient
from tests.support.triton_server import ROOT, Server, free_ports
from tests.support.waiting import wait_until

EXAMPLES = ROOT / "examples"
MIGRATION = EXAMPLES / "migrate_from_trtllm"
PROMPT = "def add(first, second):"


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a script as __main__ in this process; gives what it printed, and its exit code."""

    def run_script(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        printed = capsys.readouterr()
        return Ran(printed.out, printed.err, ended.value.code)

    return run_script


class Ran(NamedTuple):
    out: str
    err: str
    code: int

    @property
    def text(self):
        """The text of a run that went well, without the line's end."""
        assert self.code == 0, self.err
        return self.out.removesuffix("\n")


def faser(*arguments):
    command = [sys.executable, "-m", "faser_trtllm.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    """The bundled pair, built by what the migration says."""
    directory = tmp_path_factory.mktemp("built") / "engine"
    faser("build", "--config", MIGRATION / "trtllm.yaml", "--output_dir", directory, "--no_profile")
    return directory


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(engine_dir, config=EXAMPLES / "faser.yaml", log=log) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def expected(server):
    """The target's own greedy text."""
    with GrpcClient(server.grpc_url) as client:
        return "".join(response.text for response in client.stream(PROMPT, max_tokens=24, num_draft_tokens=0))


@pytest.mark.triton
@pytest.mark.slow
def test_the_grpc_client_streams_the_target_s_text(run, server, expected):
    ran = run("client_grpc.py", "--url", server.grpc_url, "--prompt", PROMPT, "--max_tokens", 24)
    assert ran.text == expected
    assert "[24 tokens, " in ran.err


@pytest.mark.triton
@pytest.mark.slow
def test_a_seed_gives_the_same_text_with_and_without_speculation(run, server):
    asked = ["--url", server.grpc_url, "--prompt", PROMPT, "--temperature", 0.9, "--seed"]
    first = run("client_grpc.py", *asked, 7).text
    assert run("client_grpc.py", *asked, 7, "--num_draft_tokens", 0).text == first
    assert run("client_grpc.py", *asked, 8).text != first


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_the_http_client_gives_the_target_s_text(run, server, expected, options):
    asked = ["--url", server.http_url, "--prompt", PROMPT, "--max_tokens", 24, *options]
    assert run("client_http.py", *asked).text == expected


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"), [("client_grpc.py", []), ("client_http.py", []), ("client_http.py", ["--stream"])]
)
def test_a_refusal_is_printed_and_ends_with_1(run, server, script, options):
    url = server.grpc_url if script == "client_grpc.py" else server.http_url
    ran = run(script, "--url", url, "--max_tokens", 0, *options)
    assert (ran.code, ran.out) == (1, "")
    assert "max_tokens" in ran.err


@pytest.mark.triton
@pytest.mark.slow
def test_the_openai_client_streams_the_target_s_text(run, server, engine_dir, expected, tmp_path):
    pytest.importorskip("openai")
    (port,) = free_ports(1)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "faser_trtllm.cli", "openai", "--port", str(port)]
    command += ["--url", f"grpc://{server.grpc_url}", "--engine_dir", str(engine_dir)]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT) as frontend:
        try:
            wait_until(lambda: "ready:" in log.read_text() or frontend.poll() is not None)
            assert frontend.poll() is None, log.read_text()
            url = f"http://127.0.0.1:{port}/v1"
            ran = run("openai_client.py", "--url", url, "--prompt", PROMPT, "--max_tokens", 24, "--num_draft_tokens", 2)
        finally:
            frontend.terminate()
    assert ran.text == expected
    assert "[24 tokens]" in ran.err


@pytest.mark.slow
def test_generating_in_process_says_the_same_with_and_without_speculation(run, engine_dir):
    """With the draft lengths that the migration ends in, and with none."""
    migrated = yaml.safe_load((MIGRATION / "faser.yaml").read_text())["speculation"]
    asked = ["--engine_dir", engine_dir, "--prompt", PROMPT, "--prompt", "hello", "--max_tokens", 24]
    drafting, alone = (run("generate.py", *asked, "--speculation", name) for name in (migrated, "off"))
    assert drafting.text == alone.text
    assert drafting.text.startswith(PROMPT)
    assert "\nhello" in drafting.text
    assert alone.err.count("0 of 0 drafts") == 2
    assert "0 of 0 drafts" not in drafting.err


def test_generating_without_engines_says_so(run, tmp_path):
    ran = run("generate.py", "--engine_dir", tmp_path)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_faser_yaml_has_every_key_with_its_default():
    written = yaml.safe_load((EXAMPLES / "faser.yaml").read_text())
    assert written == ServiceConfig().model_dump(mode="json")
    assert load_service_config(EXAMPLES / "faser.yaml").model_dump() == ServiceConfig().model_dump()


def test_faser_yaml_says_what_every_key_is():
    for line in (EXAMPLES / "faser.yaml").read_text().splitlines():
        key, _, value = line.partition(":")
        if line and not line.startswith("#") and value:
            assert "  # " in line, f"{key} has no comment"


def test_the_migrated_configuration_is_what_convert_makes_of_it(tmp_path):
    made = tmp_path / "faser.yaml"
    report = faser("convert", "--config", MIGRATION / "trtllm.yaml", "--output", made, "--json")
    assert made.read_text() == (MIGRATION / "faser.yaml").read_text()
    assert json.loads(report)["refused"] == 0
    load_service_config(made)
