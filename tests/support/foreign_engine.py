"""An engine process of another release: it speaks another version of the backend's protocol."""

from faser_trtllm.serving.engine_process import main, wire
from tests.support.fake_engine import open_echo

if __name__ == "__main__":
    wire.VERSION += 1
    main.main(opener=open_echo)
