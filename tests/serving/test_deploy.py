"""The files in deploy/, as far as they can be checked without containers: what they name exists, and fits together."""

from __future__ import annotations

import http.client
import http.server
import inspect
import json
import os
import re
import subprocess
import sys
import threading

import pytest
import yaml
from typer.main import get_command

from benchmarks.serve.__main__ import flags
from faser_trtllm.commands.table import load
from faser_trtllm.config import ServiceConfig, load_service_config
from faser_trtllm.serving.launch import launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.launch.repository import choose_models
from faser_trtllm.serving.launch.tritonserver import FIXED_CONTAINER
from tests.support.triton_server import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
NGINX_CONF = (DEPLOY / "nginx.conf").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


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
    for name in ("docs/operate.md", "SECURITY.md", "README.md", "deploy/Dockerfile"):
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
    text = (ROOT / "docs" / "operate.md").read_text()
    for path in re.findall(r"`((?:deploy|docs|triton_model_repo|faser_trtllm|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    for line in re.findall(r"faser bench serve (.+)", text):
        assert set(re.findall(r"--\w+", line)) <= set(re.findall(r"--\w+", flags().format_help())), line
