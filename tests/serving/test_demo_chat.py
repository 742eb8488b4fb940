"""The demo pair's chat template: from the checkpoint through `faser build` to `faser openai`."""

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.openai.chat_template import ChatTemplate
from tests.support.openai_frontend import Frontend
from tests.support.triton_server import ROOT, free_ports

PAIR = ROOT / "engines" / "demo"
MESSAGES = [
    {"role": "system", "content": "Small functions,\nwith types."},
    {"role": "user", "content": "The sum of two numbers.\n"},
    {"role": "assistant", "content": "\ndef add(a, b):\n    return a + b\n"},
    {"role": "user", "content": "Now <|endoftext|> the product."},
]
TEXT = """\
<|endoftext|># Small functions,
# with types.
# The sum of two numbers.
def add(a, b):
    return a + b


# Now <|endoftext|> the product.
"""


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "engine"
    build_engines(BuildOptions(PAIR / "target", PAIR / "draft", output, max_batch_size=4, max_seq_len=512))
    return output


def test_the_engine_directory_has_the_template_and_it_makes_comments(engine_dir):
    tokenizer = Tokenizer.load(engine_dir)
    template = ChatTemplate.load(engine_dir, tokenizer)
    assert template is not None
    ids = template.encode(MESSAGES)
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert ids.count(0) == 1, "a message forged the end of a text"


def test_both_of_the_pair_and_transformers_agree(engine_dir):
    from transformers import PreTrainedTokenizerFast

    for role in ("target", "draft"):
        reference = PreTrainedTokenizerFast.from_pretrained(PAIR / role)
        assert reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False) == TEXT


@pytest.mark.triton
@pytest.mark.slow
def test_chat_works_on_the_demo_without_any_option(engine_dir, tmp_path):
    http_port, grpc_port, metrics_port = free_ports()
    ports = ("--http_port", http_port, "--grpc_port", grpc_port, "--metrics_port", metrics_port)
    with Frontend(tmp_path / "log", "--engine_dir", engine_dir, *ports) as frontend:
        frontend.wait_ready()
        with frontend.client() as client:
            fields = {"model": "faser", "max_tokens": 32, "temperature": 0}
            chat = client.chat.completions.create(messages=MESSAGES[:2], **fields)
            tokenizer = Tokenizer.load(engine_dir)
            prompt = tokenizer.encode(
                "<|endoftext|># Small functions,\n# with types.\n# The sum of two numbers.\n", parse_special_tokens=True
            )
            plain = client.completions.create(prompt=prompt, **fields)
    assert chat.choices[0].message.content == plain.choices[0].text != ""
    assert chat.usage.prompt_tokens == len(prompt)
