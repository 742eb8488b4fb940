"""`faser openai` in a process of its own."""

import subprocess
import sys

import openai

from tests.support.triton_server import ROOT, free_ports
from tests.support.waiting import wait_until

MAX_SEQ_LEN = 512
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Frontend:
    """`faser openai` in a process of its own."""

    def __init__(self, log, *arguments):
        (self.port,) = free_ports(1)
        self.log = log
        command = [sys.executable, "-m", "faser_trtllm.cli", "openai", "--port", str(self.port), *map(str, arguments)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def wait_ready(self):
        def is_ready():
            assert self.process.poll() is None, self.log.read_text()
            return "ready:" in self.log.read_text()

        wait_until(is_ready)
        return self

    def client(self):
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)
