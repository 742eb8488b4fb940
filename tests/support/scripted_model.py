"""Checkpoints that say what a test wrote: the next token is a function of the last one, whatever came before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.checkpoints import write_safetensors

END = "<|end|>"


def write_scripted(
    directory: Path,
    scripts: Mapping[str, Sequence[str]],
    template: str,
    added: Sequence[str] = (),
    end_token: str = END,
) -> Path:
    """A checkpoint of a Llama whose layers do nothing -> its directory.

    scripts: after the special token of this name, which the template has to write, the model says these pieces, a token
    each, and ends. No piece may be in two places, since the piece after it would be the same. added: further tokens, as
    their texts; those that begin with <| or [ are special.
    """
    directory.mkdir(parents=True, exist_ok=True)
    chars = byte_chars()
    pieces = [piece for script in scripts.values() for piece in script]
    assert len(set(pieces)) == len(pieces), "a piece is in two places"
    vocab = {chars[byte]: byte for byte in range(256)}
    for piece in pieces:
        if piece not in added:
            vocab.setdefault("".join(chars[byte] for byte in piece.encode()), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in (end_token, *scripts, *added):
        is_special = text.startswith(("<|", "["))
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(text, normalized=False, special=is_special)])

    def token(piece: str) -> int:
        found = tokenizer.token_to_id(piece if piece in added else "".join(chars[byte] for byte in piece.encode()))
        assert found is not None
        return int(found)

    end, start = tokenizer.token_to_id(end_token), {name: tokenizer.token_to_id(name) for name in scripts}
    nexts: dict[int, int] = {}
    for name, script in scripts.items():
        ids = [start[name], *map(token, script), end]
        nexts |= dict(itertools.pairwise(ids))
    _write_model(directory, nexts, tokenizer.get_vocab_size(), end)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_token}))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def _write_model(directory: Path, nexts: Mapping[int, int], vocab_size: int, end: int) -> None:
    """One-hot embeddings, layers of zeros, and a head that maps a token to the next one."""
    hidden, inner, num_heads, head_dim = -(-vocab_size // 128) * 128, 128, 4, 32
    embedding, head = np.zeros((vocab_size, hidden), np.float32), np.zeros((vocab_size, hidden), np.float32)
    embedding[np.arange(vocab_size), np.arange(vocab_size)] = 1
    for last, following in nexts.items():
        head[following, last] = 1
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    layer, width = "model.layers.0", num_heads * head_dim
    shapes = {"self_attn.q_proj": (width, hidden), "self_attn.o_proj": (hidden, width)}
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (width // 2, hidden))
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors |= {f"{layer}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
    tensors |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    write_safetensors(directory, tensors, "bfloat16")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": end,
    }
    (directory / "config.json").write_text(json.dumps(config))


def byte_chars() -> dict[int, str]:
    """Byte-level BPE's characters."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
