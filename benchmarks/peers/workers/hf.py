"""A peer: transformers' generate and assisted generation, bf16 on CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.workers.protocol import Counts, TokenIds, serve


class Transformers:
    """transformers. Settings: "generate", and "assisted:K" for a batch of one."""

    def load(self, request: dict[str, Any]) -> dict[str, str]:
        import torch
        import transformers

        torch.set_num_threads(request["num_threads"])
        self._torch = torch
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self._target = load(request["checkpoint_dir"], dtype=torch.bfloat16).eval()
        self._draft = load(request["draft_checkpoint_dir"], dtype=torch.bfloat16).eval()
        for model in (self._target, self._draft):
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        # Constant length without a confidence threshold, as in our fixed:K.
        self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self._draft.generation_config.assistant_confidence_threshold = 0.0
        self._num_passes = 0
        self._target.register_forward_pre_hook(self._count_pass)
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def generate(self, setting: str, prompts: Sequence[list[int]], max_tokens: int, counts: Counts) -> TokenIds:
        options: dict[str, Any] = {}
        mode, _, draft_len = setting.partition(":")
        if mode == "assisted":
            self._draft.generation_config.num_assistant_tokens = int(draft_len)
            options["assistant_model"] = self._draft
        ids = self._torch.tensor(prompts)
        self._num_passes = 0
        with self._torch.inference_mode():
            output = self._target.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                **options,
            )
        counts.num_target_passes += self._num_passes * len(prompts)
        token_ids: TokenIds = output[:, ids.shape[1] :].tolist()
        return token_ids

    def steps(self, num_rows: Sequence[int], num_repeats: int) -> dict[int, float]:
        raise NotImplementedError("one-step latencies are compared with llama.cpp only")

    def _count_pass(self, *_: object) -> None:
        self._num_passes += 1


if __name__ == "__main__":
    try:
        serve(Transformers())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
