"""The same model with another tokenizer: its tokens get other ids, some go, and some come that nobody else has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from faser_trtllm.models.safetensors_file import SafetensorsFile
from faser_trtllm.models.weights import CheckpointWeights
from tests.support.checkpoints import write_safetensors

_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


def make_foreign(checkpoint: Path, directory: Path, num_dropped: int, num_own: int = 3, shift: int = 0) -> Path:
    """Write a BPE checkpoint's model without the last tokens, in another order and with tokens of its own.

    shift: each token gets the rows of the one so many ids before, as if the map to this vocabulary were wrong.
    """
    shutil.copytree(checkpoint, directory)
    definition = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = definition["model"]["vocab"]
    kept = sorted(vocab, key=lambda token: vocab[token])[: len(vocab) - num_dropped]
    order = np.random.default_rng(len(kept)).permutation(len(kept) + num_own)  # new id -> place in kept, or beyond
    tokens = [kept[i] if i < len(kept) else f"Ġown{i}" for i in order.tolist()]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    for token in definition["added_tokens"]:
        token["id"] = ids[token["content"]]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in definition["model"]["merges"]]
    definition["model"]["merges"] = [merge for merge in merges if {*merge, "".join(merge)} <= ids.keys()]
    definition["model"]["vocab"] = ids
    (directory / "tokenizer.json").write_text(json.dumps(definition))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((checkpoint / name).read_text())
        for key in ("bos_token_id", "eos_token_id"):
            if settings.get(key) is not None:
                settings[key] = ids[next(token for token, i in vocab.items() if i == settings[key])]
        if "vocab_size" in settings:
            settings["vocab_size"] = len(tokens)
        (directory / name).write_text(json.dumps(settings))
    rows = np.array([vocab.get(token, vocab[kept[-1]]) for token in tokens])
    with CheckpointWeights(checkpoint) as weights, SafetensorsFile(checkpoint / "model.safetensors") as file:
        tensors = {name: weights.read(name, np.float32) for name in file.entries}
        for name in set(_TENSORS) & tensors.keys():
            tensors[name] = tensors[name][np.roll(rows, shift)]
        write_safetensors(directory, tensors, "bfloat16")
    return directory
