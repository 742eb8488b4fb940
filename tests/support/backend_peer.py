"""An engine process and the other end of its socket, spoken to as the Triton backend does."""

import json
import os
import socket
import struct
import subprocess
import sys

from faser_trtllm import __version__
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.wire import FromBackend, OpenStatus, ToBackend
from tests.support.backend_frames import packed, packed_text, read_frame, read_responses, request_body, texts_array
from tests.support.waiting import PATIENCE_S


class Backend:
    """The other end of an engine process's socket."""

    def __init__(self, engine_dir, config="", run_dir=None, module="tests.support.fake_engine"):
        self._config = config
        self._engine_dir = engine_dir
        ours, theirs = socket.socketpair()
        self._sock = ours
        ours.settimeout(PATIENCE_S)
        command = [sys.executable, "-m", module, f"--backend_fd={theirs.fileno()}"]
        environment = {k: v for k, v in os.environ.items() if k not in ("FASER_CONFIG", "FASER_ENGINE_DIR")}
        if run_dir is not None:
            environment["FASER_RUN_DIR"] = str(run_dir)
        with theirs:
            self.process = subprocess.Popen(
                [*command, f"--parent_pid={os.getpid()}"], pass_fds=[theirs.fileno()], env=environment
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._sock.close()
        self.process.kill()
        self.process.wait()

    def send(self, kind, content=b""):
        self._sock.sendall(packed(kind, content))

    def hello(self, version=wire.VERSION, release=__version__):
        """release: None is a backend that does not say it."""
        end = packed_text(release) if release is not None else b""
        self.send(FromBackend.HELLO, struct.pack("<II", version, 0) + end)

    def open(self, model, name="faser", engine_dir=None):
        parameters = {"engine_dir": {"string_value": str(engine_dir or self._engine_dir)}}
        parameters["config"] = {"string_value": self._config}
        config = json.dumps({"parameters": parameters})
        texts = b"".join(map(packed_text, (name, "1", "/nowhere", config)))
        self.send(FromBackend.OPEN, struct.pack("<I", model) + texts)

    def ask(self, model, handle, outputs=("text_output", "finish_reason"), request_id="id", client_key="", **inputs):
        arrays = [
            (name, texts_array([[value]]) if isinstance(value, bytes) else value) for name, value in inputs.items()
        ]
        self.send(FromBackend.REQUEST, request_body(model, handle, request_id, outputs, arrays, client_key))

    def frame(self):
        """The next frame: its kind and its body."""
        return read_frame(self._sock)

    def receive(self, kind):
        """The body of the next frame of this kind; those of other kinds are passed over."""
        while True:
            found, body = self.frame()
            if found is kind:
                return body

    def opened(self):
        body = self.receive(ToBackend.OPENED)
        model, status, code = struct.unpack_from("<IBB", body)
        return model, OpenStatus(status), code, body[10:].decode()

    def answers(self, number):
        """All responses of so many requests, by handle; the Triton backend forgets a request with its last response."""
        found, ended = {}, set()
        while len(ended) < number:
            for handle, is_final, outputs, error in read_responses(self.receive(ToBackend.RESPONSES)):
                assert handle not in ended, "nothing follows the final response"
                found.setdefault(handle, []).append(error or outputs)
                if is_final:
                    ended.add(handle)
        return found

    def hang_up(self):
        self._sock.shutdown(socket.SHUT_WR)

    def closed(self):
        """The exit status."""
        while self._sock.recv(1 << 16):
            pass
        return self.process.wait(PATIENCE_S)
