"""Section "peers": transformers' generate and assisted generation with our engines' weights, batch size 1."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.agreement import agreement
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.enlarge import EnlargedWeights, shape_named
from benchmarks.gpu.models.pair import dry_shape, open_pair
from benchmarks.gpu.models.prompts import bench_prompts, max_tokens, prompt_len
from benchmarks.gpu.options import DRAFT_OF
from benchmarks.gpu.skipped import Skipped
from benchmarks.policies.drive import drive
from benchmarks.policies.workload import Job, closed_loop
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError, install
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.weights import CheckpointWeights, expected_shapes
from faser_trtllm.policy.registry import make_policy

FORMS = ("1B", "8B")
DRAFT_LENS = (4, 8)
NUM_PROMPTS = 4
Outputs = list[list[int]]


def run(bench: Bench) -> None:
    try:
        import transformers
    except ImportError as error:
        raise Skipped(f"transformers is not installed; {install('bench')}") from error
    bench.record.value("transformers", transformers.__version__)
    bench.record.value("vllm", "not measured: the suite has no code for it")
    rows: list[tuple[object, ...]] = []
    for form in FORMS[:1] if bench.is_dry else FORMS:
        if bench.left_s < 15 and not bench.is_dry:
            bench.record.error(f"the time was over before {form}")
            return
        bench.record.attempt(form, lambda form=form: _form(bench, form, rows))  # type: ignore[misc]


def _form(bench: Bench, form: str, rows: list[tuple[object, ...]]) -> None:
    prompts = [list(prompt) for prompt in bench_prompts(bench).token_ids[:NUM_PROMPTS]]
    ours: dict[str, tuple[float, Outputs]] = {}
    limits = PairLimits(4, prompt_len(bench) + max_tokens(bench) + 16, 64 if bench.is_dry else 512)
    with open_pair(bench, form, limits) as pair:
        for spelling in ("off", *(f"fixed:{k}" for k in DRAFT_LENS)):
            ours[spelling] = _ours(bench, pair, spelling, prompts)
    theirs = _transformers(bench, form, prompts)
    wanted = ours["off"][1]
    names = {"off": "generate"} | {f"fixed:{k}": f"assisted:{k}" for k in DRAFT_LENS}
    for spelling, peer in names.items():
        rate, tokens = ours[spelling]
        peer_rate, peer_tokens = theirs[peer]
        same = agreement(peer_tokens, wanted)
        rows.append(
            (
                form,
                f"{spelling} / {peer}",
                f"{rate:.0f}",
                f"{peer_rate:.0f}",
                f"{rate / peer_rate:.2f}",
                f"{100 * agreement(tokens, wanted).prefix_share:.1f}% / {100 * same.prefix_share:.1f}%",
            )
        )
    bench.record.table(
        "Greedy, one request at a time",
        ("form", "ours / transformers", "our tok/s", "their tok/s", "ratio", "as our off, ours / theirs"),
        rows,
        f"Median over {len(prompts)} prompts, prefill included, end ids ignored, a constant assistant length. as our "
        "off: share of the tokens before the first that differs; transformers sums in another order.",
    )
    bench.record.value("rows", [[str(cell) for cell in row] for row in rows])


def _ours(bench: Bench, pair: Any, spelling: str, prompts: Outputs) -> tuple[float, Outputs]:
    policy = make_policy(spelling, pair.limits.max_draft_len, None, pair.limits.max_batch_size)
    params = SamplingParams(max_tokens=max_tokens(bench))
    rates: list[float] = []
    outputs: Outputs = []
    with ExitStack() as stack:
        executor = stack.enter_context(pair.executor(policy))
        drive(executor, closed_loop((Job(tuple(prompts[0]), params),), 1))
        for prompt in prompts:
            result = drive(executor, closed_loop((Job(tuple(prompt), params),), 1))
            rates.append(len(result.token_ids[0]) / result.busy_s)
            outputs.append(list(result.token_ids[0]))
    return statistics.median(rates), outputs


def _transformers(bench: Bench, form: str, prompts: Outputs) -> dict[str, tuple[float, Outputs]]:
    import torch

    options = bench.options
    target = _model(bench, options.checkpoint_dir, form)
    draft = _model(bench, options.draft_checkpoint_dir, DRAFT_OF[form])
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    found = {}
    for name in ("generate", *(f"assisted:{k}" for k in DRAFT_LENS)):
        more: dict[str, Any] = {}
        if name != "generate":
            draft.generation_config.num_assistant_tokens = int(name.partition(":")[2])
            more["assistant_model"] = draft
        rates: list[float] = []
        outputs: Outputs = []
        for number, prompt in enumerate([prompts[0], *prompts]):
            ids = torch.tensor([prompt], device=bench.machine.device)
            bench.machine.synchronize()
            start = time.perf_counter()
            with torch.inference_mode():
                output = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens(bench),
                    do_sample=False,
                    **more,
                )
            bench.machine.synchronize()
            tokens = output[0, ids.shape[1] :].tolist()
            if number:  # the first one is a warm-up
                rates.append(len(tokens) / (time.perf_counter() - start))
                outputs.append(tokens)
        found[name] = statistics.median(rates), outputs
    return found


def _model(bench: Bench, directory: Any, shape_name: str) -> Any:
    """Return a transformers Llama with the enlarged bf16 weights, created on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    trained = load_model_config(directory)
    shape = dry_shape(trained, shape_named(shape_name)) if bench.is_dry else shape_named(shape_name)
    with CheckpointWeights(directory) as weights:
        made = EnlargedWeights(weights, trained, shape, bench.options.seed, bench.machine.device)
        config = made.config
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(LlamaConfig(**_settings(config)))
        state = {name: made.tensor(name).bfloat16() for name in expected_shapes(config)}
        model.load_state_dict(state, strict=True, assign=True)
    # Buffers (the rotary frequencies) are recreated where needed.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(bench.machine.device)
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _settings(config: ModelConfig) -> dict[str, Any]:
    if config.rope.rope_type != "default" or any(config.windows):
        raise ConfigError(
            f"rope_type is {config.rope.rope_type} and sliding_window {max(config.windows)}, this peer takes a plain "
            "Llama; use such a pair"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }
