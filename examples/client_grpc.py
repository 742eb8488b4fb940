"""Stream text from the model `faser` over gRPC, with nothing but tritonclient and numpy.

    faser serve --engine_dir engines/built/demo
    python examples/client_grpc.py --prompt "def fibonacci(n):" --max_tokens 64

The model is decoupled: one request has many responses, so it needs a gRPC stream. A response has the new text of a
step, which may be several tokens; the last response has a finish_reason and the counts.
"""

import argparse
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient


def tensor(name: str, dtype: str, value: object) -> grpcclient.InferInput:
    """Return an input of shape [1, 1]: batch size 1 and one value."""
    kinds = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32, "UINT64": np.uint64}
    array = np.array([[value]], kinds[dtype])
    infer_input = grpcclient.InferInput(name, array.shape, dtype)
    infer_input.set_data_from_numpy(array)
    return infer_input


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--prompt", default="def fibonacci(n):")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="with a temperature: the same seed gives the same text")
    parser.add_argument("--num_draft_tokens", type=int, help="maximum draft tokens per step; 0: no speculation")
    args = parser.parse_args()

    inputs = [
        tensor("text_input", "BYTES", args.prompt.encode()),
        tensor("max_tokens", "INT32", args.max_tokens),
        tensor("stream", "BOOL", True),
    ]
    if args.temperature > 0:
        inputs += [tensor("temperature", "FP32", args.temperature), tensor("seed", "UINT64", args.seed)]
    if args.num_draft_tokens is not None:
        inputs.append(tensor("num_draft_tokens", "INT32", args.num_draft_tokens))

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(args.url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer("faser", inputs)
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                print(f"error: {error}", file=sys.stderr)
                return 1
            print(result.as_numpy("text_output").item().decode(), end="", flush=True)
            if result.as_numpy("finish_reason") is not None:
                break
        client.stop_stream()

    reason = result.as_numpy("finish_reason").item().decode()
    num_tokens, num_drafts, num_accepted = (
        result.as_numpy(name).item()
        for name in ("num_output_tokens", "total_draft_tokens", "total_accepted_draft_tokens")
    )
    print(f"\n[{num_tokens} tokens, {num_accepted} of {num_drafts} drafts accepted, {reason}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
