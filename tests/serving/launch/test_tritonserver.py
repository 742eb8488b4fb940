"""How `faser serve` finds the server, which backends the server gets, and who may reach it."""

import os
import subprocess
import sys

import pytest

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.serving.launch import tritonserver
from faser_trtllm.serving.launch.tritonserver import (
    backend_library,
    check_exposure,
    find_tritonserver,
    link_backends,
    pass_on,
)
from tests.support.waiting import PATIENCE_S


def test_the_server_keeps_its_own_backends_but_for_an_older_one_of_ours(tmp_path):
    binary = tmp_path / "tritonserver" / "bin" / "tritonserver"
    for name in ("python", "onnxruntime", "faser"):
        (tmp_path / "tritonserver" / "backends" / name).mkdir(parents=True)
    binary.parent.mkdir()
    binary.touch(mode=0o755)
    (tmp_path / "link").symlink_to(binary)
    linked = link_backends(find_tritonserver(tmp_path / "link"), tmp_path / "linked")
    assert {path.name for path in linked.iterdir()} == {"python", "onnxruntime", "faser"}
    assert [path.resolve() for path in (linked / "faser").iterdir()] == [backend_library().resolve()]
    assert (linked / "python").resolve() == binary.parent.parent / "backends" / "python"


def test_all_messages_are_passed_on_but_the_one_about_no_gpu(capfd):
    says = 'E1126 23:40:01 1 cuda_block_manager.cc:102] "CudaDriverHelper has not been initialized."\n'
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        file.write(f"one\n{says}two\nthe last, cut off")
    pass_on(os.fdopen(reader, "rb"))
    assert capfd.readouterr().err == "one\ntwo\nthe last, cut off"


def test_what_is_no_program_is_refused(tmp_path):
    with pytest.raises(UnavailableError, match="which is not an executable; name the server's binary"):
        find_tritonserver(tmp_path / "nothing")


def test_without_a_server_the_way_to_one_is_told(monkeypatch):
    monkeypatch.setattr(tritonserver.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnavailableError, match=r"run `pip install --no-deps nvidia-pytriton==0\.7\.0`, or run in"):
        find_tritonserver()


@pytest.fixture
def binary(tmp_path):
    """A function that lays a tritonserver of a version out as in NVIDIA's container and returns its path."""

    def make(version):
        path = tmp_path / "bin" / "tritonserver"
        path.parent.mkdir(exist_ok=True)
        path.touch(0o755)
        if version is not None:
            (tmp_path / "TRITON_VERSION").write_text(f"{version}\n")
        return path

    return make


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
@pytest.mark.parametrize("version", ["2.51.0", "2.70.9", "1.99.0", "nonsense", None])
def test_an_old_server_is_not_shown_to_others(binary, host, version):
    with pytest.raises(InvalidArgumentError) as caught:
        check_exposure(host, binary(version))
    sentence = str(caught.value)
    assert sentence.startswith(f"host is {host}, where others can reach it, but ")
    assert ("Triton 2.51" if version == "2.51.0" else "versions before 2.71") in sentence
    assert "listen on 127.0.0.1 next to a proxy, or accept them with --allow_vulnerable_triton" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_old_server_on_loopback_is_for_this_machine(binary, host):
    check_exposure(host, binary(None))


@pytest.mark.parametrize("version", ["2.71.0", "2.100.1", "3.0.0dev"])
def test_a_server_with_the_fixes_may_listen_anywhere(binary, version):
    check_exposure("0.0.0.0", binary(version))


def test_faser_serve_refuses_the_wheel_s_server_on_all_addresses(tmp_path):
    command = [sys.executable, "-m", "faser_trtllm.cli", "serve", "--engine_dir", str(tmp_path), "--host", "0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert "--allow_vulnerable_triton" in refused.stderr
    accepted = subprocess.run(
        [*command, "--allow_vulnerable_triton"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert accepted.returncode == 2
    assert "this is not an engine directory" in accepted.stderr
