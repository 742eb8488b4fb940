"""Ask the model `faser` over HTTP, with nothing but the standard library.

    faser serve --engine_dir engines/built/demo
    python examples/client_http.py --prompt "def fibonacci(n):" --max_tokens 64
    python examples/client_http.py --prompt "def fibonacci(n):" --stream

`generate` returns one JSON object; `generate_stream` sends an event with a JSON object, after "data: ", for each step.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--prompt", default="def fibonacci(n):")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true", help="print the text as it is verified")
    args = parser.parse_args()

    # Without temperature, top_k, top_p and min_p a request is greedy. As in TensorRT-LLM, an answer that is not
    # streamed begins with the prompt unless exclude_input_in_output is true.
    fields = {
        "text_input": args.prompt,
        "max_tokens": args.max_tokens,
        "stream": args.stream,
        "exclude_input_in_output": True,
    }
    route = "generate_stream" if args.stream else "generate"
    request = urllib.request.Request(
        f"{args.url}/v2/models/faser/{route}", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            if not args.stream:
                print(json.load(answer)["text_output"])
                return 0
            for line in answer:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        print(f"error: {event['error']}", file=sys.stderr)
                        return 1
                    print(event["text_output"], end="", flush=True)
            print()
    except urllib.error.HTTPError as error:
        print(f"error: {error.read().decode()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
