"""Names of the supported model families, and the reasons why others are refused."""

from __future__ import annotations

OF_QWEN2 = ("Qwen2ForCausalLM", "MiMoForCausalLM")  # models/heads/mtp.py reads MiMo's MTP layer
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", *OF_QWEN2, "Qwen3ForCausalLM")
MIXTURES = (
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
)
SUPPORTED_ARCHITECTURES = (*DENSE, *MIXTURES)

_MLA = "its attention is latent (MLA), which needs another KV cache"
_HYBRID = "some of its layers keep a recurrent state instead of a KV cache"
_REASONS = {
    _MLA: {
        "DeepseekV2ForCausalLM": "deepseek2",
        "DeepseekV3ForCausalLM": "deepseek2",
        "DeepseekV32ForCausalLM": "deepseek2",
        "Glm4MoeLiteForCausalLM": "deepseek2",
        "LongcatFlashForCausalLM": "",
    },
    _HYBRID: {
        "Qwen3NextForCausalLM": "qwen3next",
        "Qwen3_5ForCausalLM": "qwen35",
        "Qwen3_5ForConditionalGeneration": "qwen35",
        "Qwen3_5MoeForCausalLM": "qwen35moe",
        "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
        "GraniteMoeHybridForCausalLM": "granitehybrid",
        "NemotronHForCausalLM": "nemotron_h",
        "JambaForCausalLM": "jamba",
        "KimiLinearForCausalLM": "kimi-linear",
        "Lfm2ForCausalLM": "lfm2",
        "Lfm2MoeForCausalLM": "lfm2moe",
    },
}
_REASON_OF = {
    name: reason for reason, families in _REASONS.items() for family in families.items() for name in family if name
}


def refusal(name: object, supported: tuple[str, ...]) -> str:
    """Return the end of a sentence that refuses a family: the reason if it is known, else the supported families."""
    return _REASON_OF.get(str(name)) or f"supported are {', '.join(supported)}"
