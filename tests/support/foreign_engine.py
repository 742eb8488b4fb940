"""An engine process of another release: it speaks another version of the backend's protocol."""

from faser_trtllm.serving.edge import process, wire
from tests.support.fake_engine import open_echo

if __name__ == "__main__":
    wire.VERSION += 1
    process.main(opener=open_echo)
