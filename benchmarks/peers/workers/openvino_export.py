"""Convert a Llama checkpoint with OpenVINO's tools: `... openvino_export CHECKPOINT OUT bf16`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def export(checkpoint_dir: str, output_dir: str, kind: str) -> None:
    """Export as kind bf16, int8 (a scale per output) or int4 (a scale per 32 inputs), with embedding and LM head."""
    import nncf
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import PreTrainedTokenizerFast

    load: Any = OVModelForCausalLM.from_pretrained
    tokenizer_of: Any = PreTrainedTokenizerFast  # untyped
    model = load(checkpoint_dir, export=True, compile=False, load_in_8bit=False)
    modes = nncf.CompressWeightsMode
    if kind == "int8":
        model.model = nncf.compress_weights(model.model, mode=modes.INT8_SYM)
    elif kind == "int4":
        model.model = nncf.compress_weights(model.model, mode=modes.INT4_SYM, group_size=32, ratio=1.0, all_layers=True)
    model.save_pretrained(output_dir)
    # The pipeline needs a tokenizer, although the bench sends ids.
    tokenizer = tokenizer_of(tokenizer_file=str(Path(checkpoint_dir) / "tokenizer.json"))
    converted = convert_tokenizer(tokenizer, with_detokenizer=True)
    for part, name in zip(converted, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, f"{output_dir}/openvino_{name}.xml")


if __name__ == "__main__":
    export(*sys.argv[1:])
