"""A tokenizer and a chat template that requests of several targets are read with."""

from __future__ import annotations

import functools

from faser_trtllm.models.tokenizer import Tokenizer
from tests.fuzz.scratch import folder
from tests.support.checkpoints import write_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    write_tokenizer(folder("serving"), 320)
    return Tokenizer.load(folder("serving"))
