"""Where the server is found, and the backends it gets."""

import pytest

from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.launch import tritonserver
from faser_trtllm.serving.launch.tritonserver import backend_library, find_tritonserver, link_backends


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


def test_what_is_no_program_is_refused(tmp_path):
    with pytest.raises(UnavailableError, match="which is not an executable; name the server's binary"):
        find_tritonserver(tmp_path / "nothing")


def test_without_a_server_the_way_to_one_is_told(monkeypatch):
    monkeypatch.setattr(tritonserver.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnavailableError, match=r"run `pip install --no-deps nvidia-pytriton==0\.7\.0`, or run in"):
        find_tritonserver()
