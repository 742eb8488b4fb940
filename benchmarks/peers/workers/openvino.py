"""A peer: OpenVINO GenAI's pipeline with continuous batching, plain and with a draft model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.workers.protocol import Counts, Laps, TokenIds, serve

CONVERTERS = ("nncf", "openvino_tokenizers", "optimum", "torch")
CACHE_GB = 1  # of KV cache; the bench's prompts are short


class OpenVino:
    """OpenVINO with its defaults. Settings: "generate", and "assisted:K" with a draft model.

    With integer weights it quantizes activations to 8 bits; keeps_activations turns that off.
    """

    def load(self, request: dict[str, Any]) -> dict[str, str]:
        import openvino
        import openvino_genai

        for name in CONVERTERS:
            if find_spec(name) is None:
                raise ImportError(f"No module named {name!r}")
        self._tensor, self._api = openvino.Tensor, openvino_genai
        self._request = request
        self._pipelines: dict[bool, Any] = {}
        self._target = _exported(request["checkpoint_dir"], "target", request["kind"])
        self._draft = ""
        if request.get("draft_checkpoint_dir"):
            self._draft = _exported(request["draft_checkpoint_dir"], "draft", request["kind"])
        self._pipeline(False)
        return {"openvino-genai": openvino_genai.__version__}

    def generate(self, setting: str, prompts: Sequence[list[int]], max_tokens: int, counts: Counts) -> TokenIds:
        mode, _, draft_len = setting.partition(":")
        pipeline = self._pipeline(mode == "assisted")
        config = self._api.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if mode == "assisted":
            config.num_assistant_tokens = int(draft_len)
        handles = [
            pipeline.add_request(number, self._tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        outputs: TokenIds = [[] for _ in prompts]
        laps, waiting = Laps(counts), True
        while pipeline.has_non_finished_requests():
            pipeline.step()
            counts.num_target_passes += len(prompts)
            for handle, output in zip(handles, outputs, strict=True):
                if handle.can_read():
                    for result in handle.read().values():
                        output += result.generated_ids
            if not waiting:
                laps.end_step()
            elif all(outputs):
                laps.end_prefill()
                waiting = False
        return [output[:max_tokens] for output in outputs]

    def steps(self, num_rows: Sequence[int], num_repeats: int) -> dict[int, float]:
        raise NotImplementedError("the pipeline has no single pass")

    def _pipeline(self, drafts: bool) -> Any:
        if drafts not in self._pipelines:
            api, request = self._api, self._request
            scheduler = api.SchedulerConfig()
            scheduler.cache_size = CACHE_GB
            scheduler.enable_prefix_caching = False  # prompts repeat every round
            scheduler.max_num_batched_tokens = request["max_rows"]
            threads = {"INFERENCE_NUM_THREADS": request["num_threads"]}
            options: dict[str, Any] = dict(threads)
            if request.get("keeps_activations"):
                options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
            if drafts:
                options["draft_model"] = api.draft_model(self._draft, "CPU", **threads)
            self._pipelines[drafts] = api.ContinuousBatchingPipeline(self._target, scheduler, "CPU", options)
        return self._pipelines[drafts]


def _exported(checkpoint_dir: str, name: str, kind: str) -> str:
    """Convert in a separate process, since the libraries for it use memory and threads."""
    path = Path(f"{name}-{kind}").resolve()
    command = [sys.executable, "-m", "benchmarks.peers.workers.openvino_export", checkpoint_dir, str(path), kind]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the conversion to {kind} ended with status {done.returncode}")
    return str(path)


if __name__ == "__main__":
    try:
        serve(OpenVino())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
