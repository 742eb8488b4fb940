"""Stream a completion through OpenAI's own client.

    pip install openai
    faser openai --engine_dir engines/built/demo
    python examples/openai_client.py --prompt "def fibonacci(n):" --max_tokens 64

Fields that OpenAI does not have, such as num_draft_tokens, go into extra_body; docs/reference/request_fields.md lists
them.
"""

import argparse
import sys

import openai


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:9000/v1")
    parser.add_argument("--prompt", default="def fibonacci(n):")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--num_draft_tokens", type=int, help="maximum draft tokens per step; 0: no speculation")
    args = parser.parse_args()

    extra = {} if args.num_draft_tokens is None else {"num_draft_tokens": args.num_draft_tokens}
    client = openai.OpenAI(base_url=args.url, api_key="not checked")
    try:
        chunks = client.completions.create(
            model="faser",
            prompt=args.prompt,
            max_tokens=args.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for chunk in chunks:
            for choice in chunk.choices:
                print(choice.text, end="", flush=True)
            if chunk.usage is not None:
                print(f"\n[{chunk.usage.completion_tokens} tokens]", file=sys.stderr)
    except openai.APIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
