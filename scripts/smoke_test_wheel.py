"""Install a wheel in an empty environment, and use it there as somebody does who has nothing else.

    python scripts/smoke_test_wheel.py dist/faser_trtllm-X.Y.Z-py3-none-PLATFORM.whl

Prints one line per step and ends with status 1 at the first that fails. The environment has no pip cache, an empty HOME
and no variable of Python or pip that could point at the checkout; the package index is the usual one. From the checkout
come constraints.txt, the demo pair and the clients of `examples`. It takes 0.5 GB and 40 s of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "serve,openai"
PROMPT = "def fibonacci(n):"
MAX_TOKENS = 48
COMMAND_TIMEOUT_S = 1200  # arm64 is slow where it is emulated
READY_TIMEOUT_S = 300
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE")
PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_DEFAULT_TIMEOUT")


class StepError(Exception):
    """A step did not do what a user would expect; its sentence says what."""


class Environment:
    """A virtual environment with the wheel, next to an empty HOME; commands run in a folder that has nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.bin = folder / "venv" / "bin"
        for path in (self.work, folder / "home"):
            path.mkdir()
        passed = {name: os.environ[name] for name in KEPT_VARIABLES + PIP_VARIABLES if name in os.environ}
        self.variables = passed | {
            "HOME": str(folder / "home"),
            "PATH": f"{self.bin}:{passed['PATH']}",
            "PIP_CACHE_DIR": str(folder / "pip_cache"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, *command: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command; StepError if it ends with another status."""
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=self.work, env=self.variables, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
        if done.returncode != status:
            output = (done.stdout + done.stderr)[-3000:]
            raise StepError(f"`{' '.join(words)}` ended with status {done.returncode}, expected {status}:\n{output}")
        return done

    def faser(self, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run(self.bin / "faser", *arguments, status=status)

    def python(self, *arguments: object) -> str:
        return self.run(self.bin / "python", *arguments).stdout

    @contextmanager
    def service(self, *arguments: object, ready_url: str) -> Iterator[None]:
        """A `faser` command that serves; on leaving, SIGTERM must end it with status 0."""
        log = self.folder / f"{arguments[0]}.log"
        with log.open("w") as output:
            command = [str(self.bin / "faser"), *map(str, arguments)]
            process = subprocess.Popen(command, cwd=self.work, env=self.variables, stdout=output, stderr=output)
        try:
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not _answers(ready_url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise StepError(f"faser {arguments[0]} was never ready:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield
            process.send_signal(signal.SIGTERM)
            if process.wait(timeout=60) != 0:
                raise StepError(
                    f"faser {arguments[0]} ended with status {process.returncode} after SIGTERM:\n"
                    f"{log.read_text()[-3000:]}"
                )
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def install(environment: Environment, wheel: Path) -> str:
    environment.run(sys.executable, "-m", "venv", environment.folder / "venv")
    constraints = ROOT / "constraints.txt"
    pip = (environment.bin / "python", "-m", "pip", "install", "--quiet", "-c", constraints)
    environment.run(*pip, f"{wheel}[{EXTRAS}]")
    environment.run(*pip, "--no-deps", "nvidia-pytriton")
    where = Path(environment.python("-c", "import faser_trtllm; print(faser_trtllm.__file__)").strip())
    _expect(where.is_relative_to(environment.folder), f"faser_trtllm is imported from {where}, not from the wheel")
    listed = json.loads(environment.python("-m", "pip", "list", "--format=json"))
    names = {entry["name"].lower() for entry in listed}
    unwanted = sorted(name for name in names if name == "torch" or name.startswith(("nvidia-cu", "cuda", "tensorrt")))
    _expect(not unwanted, f"the wheel pulled {', '.join(unwanted)}, which a CPU does not need")
    return f"{len(names)} packages, neither torch nor CUDA"


def look(environment: Environment, wheel: Path) -> str:
    version = environment.faser("version").stdout.strip()
    named = wheel.name.split("-")[1]
    _expect(version.startswith(f"faser_trtllm {named},"), f"faser version says {version!r}, the wheel is {named}")
    _expect("generate" in environment.faser("--help").stdout, "faser --help does not list the commands")
    for command in (("plan", "--help"), ("bench",), ("check", "--trtllm")):
        error = environment.faser(*command, status=2).stderr.strip()
        is_clear = error.count("\n") == 0 and "not part of the installed package; clone the repository" in error
        _expect(is_clear, f"faser {command[0]} does not say that it needs a checkout, but {error!r}")
    return f"{version}; plan, bench and check --trtllm say that they need a checkout"


def build(environment: Environment) -> str:
    for role in ("target", "draft"):
        shutil.copytree(ROOT / "engines" / "demo" / role, environment.work / role)
    environment.faser(
        "build", "--checkpoint_dir", "target", "--draft_checkpoint_dir", "draft", "--output_dir", "engines"
    )
    environment.faser("check", "--engine_dir", "engines")
    return "engines of the demo pair"


def generate(environment: Environment) -> str:
    """Return the text, which must not depend on speculation."""
    found = {}
    for speculation in ("off", "fixed:4"):
        limits = ("--prompt", PROMPT, "--max_tokens", MAX_TOKENS, "--json")
        line = environment.faser("generate", "--engine_dir", "engines", "--speculation", speculation, *limits).stdout
        found[speculation] = json.loads(line)
    _expect(found["fixed:4"]["num_accepted_tokens"] > 0, "no draft was accepted")
    plain, speculative = found["off"]["text"], found["fixed:4"]["text"]
    _expect(plain == speculative, f"speculation changes the text: {plain!r} without, {speculative!r} with it")
    return str(plain)


def serve(environment: Environment, text: str) -> str:
    """Ask a Triton server over gRPC and HTTP, and the OpenAI API in front of it."""
    http, grpc, metrics, openai = _free_ports(4)
    for name in ("client_grpc.py", "client_http.py"):
        shutil.copy(ROOT / "examples" / name, environment.work / name)
    ports = ("--http_port", http, "--grpc_port", grpc, "--metrics_port", metrics)
    limits = ("--prompt", PROMPT, "--max_tokens", MAX_TOKENS)
    ready_url = f"http://127.0.0.1:{http}/v2/health/ready"
    answers = {}
    with environment.service("serve", "--engine_dir", "engines", *ports, ready_url=ready_url):
        answers["gRPC"] = environment.python("client_grpc.py", "--url", f"127.0.0.1:{grpc}", *limits)
        answers["HTTP"] = environment.python("client_http.py", "--url", f"http://127.0.0.1:{http}", *limits)
        api = ("--engine_dir", "engines", "--url", f"grpc://127.0.0.1:{grpc}", "--port", openai)
        with environment.service("openai", *api, ready_url=f"http://127.0.0.1:{openai}/v1/models"):
            fields = {"model": "faser", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
            answers["OpenAI"] = _post(f"http://127.0.0.1:{openai}/v1/completions", fields)["choices"][0]["text"]
    for protocol, answer in answers.items():
        is_equal = answer.rstrip("\n") == text.rstrip("\n")
        _expect(is_equal, f"{protocol} answers {answer!r}, faser generate {text!r}")
    return f"{', '.join(answers)} answer as faser generate does; both servers ended with status 0"


def _expect(is_so: bool, sentence: str) -> None:
    if not is_so:
        raise StepError(sentence)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _post(url: str, fields: dict[str, object]) -> dict:
    request = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def report(step: str, result: str) -> None:
    print(f"{step}: {result}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    if not wheel.is_file() or wheel.suffix != ".whl":
        print(f"wheel is {wheel}, which is not a .whl file; build one with pip wheel --no-deps", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="faser_wheel_") as folder:
        try:
            environment = Environment(Path(folder))
            report("install", install(environment, wheel))
            report("commands", look(environment, wheel))
            report("build, check", build(environment))
            text = generate(environment)
            report("generate", f"{text!r} with and without speculation")
            report("serve, openai", serve(environment, text))
        except (StepError, subprocess.TimeoutExpired) as error:
            print(f"smoke_test_wheel.py: {error}", file=sys.stderr)
            return 1
    print(f"{wheel.name} works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
