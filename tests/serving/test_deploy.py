"""The files in deploy/, as far as they can be checked without containers: what they name exists, and fits together.

Where an nginx is on the path (or in FASER_NGINX), the proxy's configuration runs in front of a real server.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import inspect
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest
import tritonclient.grpc as grpcclient
import yaml
from tritonclient.utils import InferenceServerException
from typer.main import get_command

from faser_trtllm.bench.serve.__main__ import flags
from faser_trtllm.commands.table import load
from faser_trtllm.config import ServiceConfig, load_service_config
from faser_trtllm.serving.client import GrpcClient, generate_http, infer_input, stream_http
from faser_trtllm.serving.launch import launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.launch.repository import choose_models
from faser_trtllm.serving.launch.tritonserver import FIXED_CONTAINER
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import ENDLESS
from tests.support.triton_server import ROOT, Server, free_ports
from tests.support.waiting import PATIENCE_S, wait_until

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
NGINX_CONF = (DEPLOY / "nginx.conf").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
NGINX = os.environ.get("FASER_NGINX") or shutil.which("nginx")


def resources():
    for path in yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"]:
        yield from yaml.safe_load_all((DEPLOY / path).read_text())


def resource(kind):
    (found,) = (item for item in resources() if item["kind"] == kind)
    return found


def pod():
    return resource("Deployment")["spec"]["template"]["spec"]


def serve_flags():
    command = get_command(load("serve"))
    return {flag for parameter in command.params for flag in parameter.opts}


def check_serve_command(arguments):
    assert arguments[0] == "serve"
    assert {argument for argument in arguments if argument.startswith("--")} <= serve_flags()
    assert "--host" not in arguments, "faser stays on loopback; the proxy is the way in"


def test_every_yaml_file_can_be_read():
    files = sorted(DEPLOY.rglob("*.yaml")) + sorted(DEPLOY.rglob("*.yml"))
    assert len(files) >= 10
    for path in files:
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text())), path


def test_dockerfile_copies_what_is_there_and_starts_a_command_that_is():
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
            assert f"!{source}" in ignore, f"{source} is not in the build's context"
    check_serve_command(json.loads(re.search(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)[1]))
    extras = re.search(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE)[1].split(",")
    extras += yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["faser"]["build"]["args"][
        "EXTRAS"
    ].split(",")
    torch = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["faser"]["build"]["args"]["TORCH"]
    assert torch in (ROOT / "constraints.txt").read_text().splitlines()
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{re.escape(extra)} = \[", project, re.MULTILINE) for extra in extras)
    assert extras.count("guided") == 2, "both images answer requests with a guide"
    assert re.search(r"^USER 1000:1000$", DOCKERFILE, re.MULTILINE)


def test_the_triton_image_is_not_older_than_the_guide_demands():
    year, month = re.search(r"tritonserver:(\d+)\.(\d+)-py3", DOCKERFILE).groups()
    assert f"{year}.{month}" >= FIXED_CONTAINER
    for name in ("docs/deployment.md", "SECURITY.md", "README.md", "deploy/Dockerfile"):
        assert FIXED_CONTAINER in (ROOT / name).read_text(), name


def test_compose_mounts_what_is_there_and_publishes_on_loopback_only():
    for name, service in COMPOSE["services"].items():
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["cap_drop"] == ["ALL"], name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} on every address"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), volume
                assert volume.endswith(":ro")
    faser = COMPOSE["services"]["faser"]
    check_serve_command(faser["command"])
    assert "ports" not in faser
    assert faser["network_mode"] == "service:proxy"
    assert (DEPLOY / faser["build"]["context"] / faser["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


class Readiness(http.server.BaseHTTPRequestHandler):
    """Answers a GET with the server's `status`."""

    def do_GET(self):
        self.send_response(self.server.status if self.path == "/v2/models/faser/ready" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(("answer", "code"), [(200, 0), (400, 1)])
def test_the_health_check_of_compose_asks_the_server_and_no_proxy(answer, code):
    python, option, text = COMPOSE["services"]["faser"]["healthcheck"]["test"][1:]
    assert (python, option) == ("/opt/faser/bin/python", "-c")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Readiness) as server:
        server.status = answer
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert text.count("8000") == 1
        command = [sys.executable, "-c", text.replace("8000", str(server.server_address[1]))]
        environment = {"http_proxy": "http://127.0.0.1:9", "PATH": os.environ["PATH"]}
        try:
            assert subprocess.run(command, env=environment, timeout=60).returncode == code
        finally:
            server.shutdown()
            thread.join()


def test_proxy_ports_are_those_that_everyone_names():
    listening = set(map(int, re.findall(r"listen (\d+)", NGINX_CONF)))
    assert listening == {8080, 8081, 8082}
    defaults = inspect.signature(ServeOptions).parameters
    upstream = set(map(int, re.findall(r"127\.0\.0\.1:(\d+)", NGINX_CONF)))
    assert upstream == {defaults[name].default for name in ("http_port", "grpc_port", "metrics_port")}
    assert {int(port.split(":")[-1]) for port in COMPOSE["services"]["proxy"]["ports"]} == {8080, 8081}
    (sidecar,) = pod()["initContainers"]
    ports = {port["name"]: port["containerPort"] for port in sidecar["ports"]}
    assert set(ports.values()) == listening
    for port in resource("Service")["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    allowed = {port["port"] for rule in resource("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
    assert allowed == listening


def test_proxy_knows_every_model_and_lets_in_nothing_that_controls():
    models = set(choose_models(ROOT / "triton_model_repo", None))  # those that are loaded unless others are named
    for group in re.findall(r"models/\(([^)]+)\)", NGINX_CONF):
        assert set(group.split("|")) == models
    for word in ("repository", "sharedmemory", "SharedMemory", "trace", "logging", "LogSettings", "ModelConfig"):
        assert not re.search(rf"location .*{word}", NGINX_CONF), word


def test_prometheus_and_grafana_find_each_other():
    ours = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    docs = yaml.safe_load((ROOT / "docs" / "observability" / "prometheus.yml").read_text())
    assert ours["scrape_configs"][0]["static_configs"][0].pop("targets") == ["proxy:8082"]
    docs["scrape_configs"][0]["static_configs"][0].pop("targets")
    assert ours == docs
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/grafana.json" in mounts


def test_kustomization_names_files_that_are_there():
    kustomization = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    (config,) = kustomization["configMapGenerator"]
    for path in kustomization["resources"] + config["files"]:
        assert (DEPLOY / path).is_file(), path
    assert len([path for path in (DEPLOY / "kubernetes").iterdir() if path.name != "faser.yaml"]) == len(
        kustomization["resources"]
    )
    (volume,) = (volume for volume in pod()["volumes"] if "configMap" in volume)
    assert volume["configMap"]["name"] == config["name"]
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert kustomization["images"] == [{"name": "faser-trtllm", "newTag": project}]
    assert COMPOSE["services"]["faser"]["image"] == f"faser-trtllm:{project}"


def test_pod_is_locked_down_and_its_mounts_and_selectors_fit():
    spec, deployment = pod(), resource("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    selectors = [
        deployment["selector"]["matchLabels"],
        resource("Service")["spec"]["selector"],
        resource("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        resource("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    volumes = {volume["name"] for volume in spec["volumes"]}
    containers = spec["containers"] + spec["initContainers"]
    assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes
    for container in containers:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["runAsUser"] > 0
    check_serve_command(spec["containers"][0]["args"])


def test_service_config_fits_the_pod_s_limits_and_grace_period():
    config = load_service_config(DEPLOY / "kubernetes" / "faser.yaml")
    spec = pod()
    (container,) = spec["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert int(container["resources"]["limits"]["cpu"]) == config.num_threads
    # Launcher.stop(): the drain and 3 s, the exit timeout and 5 s; the preStop hook counts too.
    stop_s = config.drain_timeout_s + 3 + launcher.EXIT_TIMEOUT_S + 5
    pre_stop_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > pre_stop_s + stop_s
    assert float(COMPOSE["services"]["faser"]["stop_grace_period"].rstrip("s")) > stop_s
    assert float(re.search(r"worker_shutdown_timeout (\d+)s", NGINX_CONF)[1]) > stop_s
    startup = container["startupProbe"]
    startup_s = ServiceConfig().startup_timeout_s + 30
    assert startup["periodSeconds"] * startup["failureThreshold"] > startup_s
    assert float(COMPOSE["services"]["faser"]["healthcheck"]["start_period"].rstrip("s")) > startup_s
    live = container["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > ServiceConfig().hang_timeout_s + startup_s
    readiness = container["readinessProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 5


def test_the_guide_names_files_and_flags_that_exist():
    text = (ROOT / "docs" / "deployment.md").read_text()
    for path in re.findall(r"`((?:deploy|docs|triton_model_repo|faser_trtllm|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    for line in re.findall(r"faser bench serve (.+)", text):
        assert set(re.findall(r"--\w+", line)) <= set(re.findall(r"--\w+", flags().format_help())), line


pytest_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx on the path or in FASER_NGINX")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """Ports of the proxy for HTTP, gRPC and metrics, before a real Triton server."""
    directory = tmp_path_factory.mktemp("proxied")
    write_tokenizer(directory, 320)
    with Server(directory, is_fake=True, log=directory / "log") as server:
        server.wait_ready()
        ports = free_ports()
        text = NGINX_CONF.replace("/tmp/", f"{directory}/")
        keys = "".join(f'"Bearer {name}" tenant-{name};\n' for name in "abc")
        text = text.replace("default $remote_addr;\n", f"default $remote_addr;\n{keys}")
        moved = dict(zip((8080, 8081, 8082), ports, strict=True)) | dict(
            zip((8000, 8001, 8002), server.ports, strict=True)
        )
        for number, port in moved.items():
            text = re.sub(rf"(listen |127\.0\.0\.1:){number}\b", rf"\g<1>{port}", text)
        conf = directory / "nginx.conf"
        conf.write_text(text)
        command = [
            NGINX,
            "-c",
            str(conf),
            "-g",
            "daemon off;",
            "-p",
            str(directory),
            "-e",
            str(directory / "error.log"),
        ]
        process = subprocess.Popen(command)
        try:
            wait_until(lambda: process.poll() is not None or status(ports[0], "GET", "/v2/health/ready") == 200)
            assert process.poll() is None, (directory / "error.log").read_text()
            yield ports
        finally:
            process.terminate()
            process.wait(10)


def status(port, verb, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(
            verb, path, body, headers or {}, encode_chunked=(headers or {}).get("Transfer-Encoding") is not None
        )
        return connection.getresponse().status
    except ConnectionRefusedError:
        return None
    finally:
        connection.close()


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_requests_pass_the_proxy(proxied):
    url = f"http://127.0.0.1:{proxied[0]}"
    assert generate_http(url, "abc", max_tokens=6).num_output_tokens == 6
    started_s = time.monotonic()
    arrivals_s = [time.monotonic() - started_s for _ in stream_http(url, "abc", max_tokens=60)]
    assert len(arrivals_s) > 5
    assert arrivals_s[0] < arrivals_s[-1] / 2, "the answer was held back"
    with GrpcClient(f"127.0.0.1:{proxied[1]}") as client:
        for _ in range(3):
            assert list(client.stream("abc", max_tokens=6))[-1].num_output_tokens == 6
    chunks = iter([b'{"text_input": "abc",', b'"max_tokens": 4}'])
    headers = {"Transfer-Encoding": "chunked"}
    assert status(proxied[0], "POST", "/v2/models/faser/generate", chunks, headers) == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{proxied[2]}/metrics", timeout=5) as answer:
        assert b"faser_engine_ready" in answer.read()


class Stream:
    """An open generate_stream of a tenant, through the proxy."""

    def __init__(self, port, tenant, headers=None, **fields):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        body = json.dumps({"text_input": "abc", "stream": True, "max_tokens": ENDLESS} | fields)
        keys = {"Authorization": f"Bearer {tenant}"} | (headers or {})
        self._connection.request("POST", "/v2/models/faser/generate_stream", body, keys)
        self.answer = self._connection.getresponse()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._connection.close()

    def event(self):
        """The next event, None at the end."""
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_the_proxy_says_who_a_client_is(proxied):
    """A stop by an id that may be guessed ends a request of the same client only, so it tells who is taken for whom."""
    port, stop = proxied[0], {"id": "1", "stop": True}
    with Stream(port, "a", id="1") as victim:
        assert victim.event()["text_output"]
        with Stream(port, "b", {"x-faser-client": "tenant-a", "X-Faser-Client": "tenant-a"}, **stop) as attack:
            assert attack.answer.status == 200
        with Stream(port, "b", **stop, **{"x-faser-client": "tenant-a"}) as attack:
            assert attack.answer.status == 200
        with Stream(port, "b", **stop, parameters={"x-faser-client": "tenant-a"}) as attack:
            assert attack.answer.status == 400
            assert "x-faser-client was sent twice" in attack.event()["error"]
        with grpcclient.InferenceServerClient(f"127.0.0.1:{proxied[1]}") as client:
            answers = queue.Queue()
            claims = {"authorization": "Bearer b", "x-faser-client": "tenant-a"}
            client.start_stream(callback=lambda result, error: answers.put(error), headers=claims)
            inputs = [infer_input(grpcclient, name, value) for name, value in (("text_input", ""), ("stop", True))]
            client.async_stream_infer("faser", inputs, request_id="1", enable_empty_final_response=True)
            assert answers.get(timeout=PATIENCE_S) is None
            client.stop_stream()
        for _ in range(30):
            assert "finish_reason" not in victim.event(), "a foreign stop had an effect"
        with Stream(port, "a", **stop) as own:
            assert own.answer.status == 200
        while "finish_reason" not in (event := victim.event()):
            pass
        assert event["finish_reason"] == "cancelled"


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_the_proxy_lets_no_client_open_more_than_its_quota(proxied):
    quota = int(re.search(r"limit_conn faser_open (\d+);", NGINX_CONF)[1])
    with contextlib.ExitStack() as streams:
        for _ in range(quota):
            assert streams.enter_context(Stream(proxied[0], "c")).event()["text_output"]
        with Stream(proxied[0], "c") as beyond:
            assert beyond.answer.status == 429
        with Stream(proxied[0], "b", max_tokens=2) as other:
            assert other.event()["text_output"]


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("body", ["[1]", "{}", "", "null", '"a"', '{"text_input": "abc"}}', "  \n{"])
def test_a_body_that_is_no_object_is_refused_through_the_proxy(proxied, body):
    assert status(proxied[0], "POST", "/v2/models/faser/generate", body) in (400, 500)  # 500 is Triton's for no JSON


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "verb", "path", "expected"),
    [
        (0, "GET", "/v2/models/faser/ready", 200),
        (0, "GET", "/v2/models/faser/config", 403),
        (0, "POST", "/v2/repository/index", 403),
        (0, "POST", "/v2/repository/models/faser/unload", 403),
        (0, "GET", "/v2/models/faser/../../repository/index", 403),
        (0, "GET", "/v2/models/faser/generate/%2e%2e/config", 403),
        (0, "POST", "//v2//repository//index", 403),
        (0, "GET", "/v2/systemsharedmemory/status", 403),
        (0, "POST", "/v2/trace/setting", 403),
        (0, "POST", "/v2/logging", 403),
        (0, "GET", "/v2/models/faser/stats", 403),
        (0, "GET", "/v2/models/faser/generate", 403),
        (0, "POST", "/v2/models/faser/infer", 403),
        (0, "GET", "/metrics", 403),
        (2, "GET", "/v2/health/ready", 403),
        (2, "POST", "/metrics", 403),
    ],
)
def test_everything_else_does_not(proxied, place, verb, path, expected):
    assert status(proxied[place], verb, path, b"{}" if verb == "POST" else None) == expected


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("origin", ["https://example.com", "http://localhost:8080", "null"])
def test_a_web_page_in_a_browser_gets_nothing(proxied, origin):
    """Such requests need no leave of the server: a form's content type, and a header that a page cannot leave out."""
    body, headers = b'{"text_input": "abc", "max_tokens": 3}', {"Content-Type": "application/x-www-form-urlencoded"}
    path = "/v2/models/faser/generate"
    assert status(proxied[0], "POST", path, body, headers) == 200
    assert status(proxied[0], "POST", path, body, headers | {"Origin": origin}) == 403


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_limits_and_control_over_grpc(proxied):
    body = b'{"text_input": "' + b"a" * (5 << 20) + b'"}'
    assert status(proxied[0], "POST", "/v2/models/faser/generate", body) == 413
    with grpcclient.InferenceServerClient(f"127.0.0.1:{proxied[1]}") as client:
        assert client.is_model_ready("faser")
        for forbidden in (
            client.get_model_repository_index,
            client.get_system_shared_memory_status,
            client.get_log_settings,
            lambda: client.get_model_config("faser"),
            lambda: client.unload_model("faser"),
        ):
            with pytest.raises(InferenceServerException) as caught:
                forbidden()
            assert str(grpc.StatusCode.PERMISSION_DENIED) in str(caught.value.status())
        assert client.is_model_ready("faser")
