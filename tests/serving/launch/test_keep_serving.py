"""A server that cannot start again for a moment is tried once more, whatever the operating system refuses."""

import threading
from types import SimpleNamespace

import pytest

from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.launch import launcher
from faser_trtllm.serving.launch.launcher import keep_serving
from faser_trtllm.serving.launch.options import ServeOptions

FULL_DISK = OSError(28, "No space left on device")


def starts(monkeypatch, errors):
    """Start servers that raise these errors (None: a signal ends the server) until one serves -> status, starts."""
    stop, launches = threading.Event(), []

    class Launcher(SimpleNamespace):
        conversion, is_synthetic, end_signal = None, False, "SIGKILL"
        config = ServiceConfig(restart_backoff_s=0.01, restart_backoff_max_s=0.01)

        def __init__(self, options, hashes, is_restart):
            self.number = len(launches)
            launches.append(is_restart)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def start(self):
            if self.number < len(errors) and errors[self.number] is not None:
                raise errors[self.number]

        def wait_ready(self, stop):
            return True

        def is_running(self):
            return self.number >= len(errors)

        def stop(self):
            pass

    def on_ready(server, options):
        if server.is_running():
            stop.set()

    monkeypatch.setattr(launcher, "Launcher", Launcher)
    status = keep_serving(ServeOptions(engine_dir="x"), stop, threading.Event(), on_ready, threading.Event())
    return status, launches


@pytest.mark.parametrize("error", [FULL_DISK, UnavailableError("the port is taken")])
def test_a_restart_that_fails_is_tried_once_more(monkeypatch, capfd, error):
    assert starts(monkeypatch, [None, error, error]) == (0, [False, True, True, True])
    found = capfd.readouterr().err
    assert found.count("the server could not be started again and is tried once more") == 2
    assert str(error) in found


@pytest.mark.parametrize("error", [FULL_DISK, UnavailableError("the port is taken")])
def test_the_first_start_s_failure_ends_the_command(monkeypatch, error):
    with pytest.raises(type(error)) as caught:
        starts(monkeypatch, [error])
    assert caught.value is error
