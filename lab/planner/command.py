"""`faser plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.progress import ProgressBar
from faser_trtllm.errors import ConfigError, reason_of

EXAMPLES = (
    "Examples: faser plan --gpu h100 --target llama-3.1-8b --draft llama-3.2-1b --acceptance 0.7 --load 8,64 "
    "--report plan.html; faser plan --gpu h200 --target checkpoints/target --draft checkpoints/draft "
    "--acceptance acceptance.json --load trace.csv --ttft_ms 500 --tpot_ms 20 --json. "
    "A minute or two per load; nothing needs a GPU."
)


def plan(
    gpu: Annotated[str, typer.Option("--gpu", help="h100, h200, b200, a100 or l40s")],
    target: Annotated[str, typer.Option("--target", help="a checkpoint directory, or a name such as llama-3.1-8b")],
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            help="the same for the draft model, or eagle3 or block for such a drafter of the target",
        ),
    ],
    acceptance: Annotated[
        str,
        typer.Option(
            "--acceptance",
            help='acceptance rate of drafts, a file {"by_place": [...]}, or a published curve such as eagle3, dspark, '
            "mtp or kimi-k3-dspark",
        ),
    ],
    load: Annotated[
        str, typer.Option("--load", help="concurrent requests, CSV files, or a trace with its rate such as azure:5")
    ] = "8,64",
    num_gpus: Annotated[int, typer.Option("--num_gpus", help="GPUs that share the target (tensor parallelism)")] = 1,
    quantization: Annotated[str, typer.Option("--quantization", help="the target's: none or fp8")] = "none",
    requests: Annotated[
        str, typer.Option("--requests", help="tokens per request: PROMPT,OUTPUT or a trace's name")
    ] = "sharegpt",
    ttft_ms: Annotated[float | None, typer.Option("--ttft_ms", help="objective: time to first token in ms")] = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot_ms", help="objective: time per output token in ms")] = None,
    eagle3_acceptance: Annotated[
        str | None, typer.Option("--eagle3_acceptance", help="acceptance of an EAGLE-3 head; default: --acceptance")
    ] = None,
    block_acceptance: Annotated[
        str | None, typer.Option("--block_acceptance", help="acceptance of a block drafter; default: --acceptance")
    ] = None,
    expert_overlap: Annotated[
        float | None,
        typer.Option(
            "--expert_overlap",
            help="mixture of experts: share of a row's experts that another row of its request uses, too; default: 0.2",
        ),
    ] = None,
    exit_signal: Annotated[
        str,
        typer.Option(
            "--exit_signal",
            help="price+pruning: shares of rejected and of accepted drafts that an early exit at a quarter of the "
            "layers prunes",
        ),
    ] = "0.4,0.03",
    systems: Annotated[
        str | None, typer.Option("--systems", help="systems to compare, such as price;fixed:3; default: all")
    ] = None,
    max_requests: Annotated[int, typer.Option("--max_requests", help="most requests of one run")] = 2000,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="profile.json of the pair on this GPU, or h100-measured; default: the cost model"),
    ] = None,
    save_table: Annotated[
        Path | None, typer.Option("--save_table", help="write the modeled table, for faser bench policies --simulated")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="write an HTML page with plots to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    seed: Annotated[int, typer.Option("--seed", help="seed for lengths, arrivals and acceptance")] = 0,
) -> None:
    """Simulate the gain from speculation on a GPU that you do not have.

    The real scheduler and policies run on modeled times with error bands (docs/plan.md).
    """
    from lab.costmodel.gpu import find_gpu
    from lab.costmodel.pair import Pair
    from lab.costmodel.shape import find_shape
    from lab.costmodel.table import modeled_table
    from lab.planner.options import (
        PlanOptions,
        find_draft,
        parse_acceptance,
        parse_exit_signal,
        parse_loads,
        parse_requests,
    )
    from lab.planner.page import render_page
    from lab.planner.plan import make_plan
    from lab.planner.systems import parse_systems
    from lab.planner.text import render_text

    if quantization not in ("none", "fp8"):
        raise ConfigError(f"quantization is {quantization!r}; it must be none or fp8")
    for path in (report, save_table):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} has no folder to go to; create {path.absolute().parent}")
    shape = find_shape(target).on(num_gpus)
    if quantization == "fp8" and shape.experts is not None:
        raise ConfigError(
            f"quantization is fp8, but {target} has a mixture of experts, whose grouped products are in bfloat16; "
            "leave --quantization out"
        )
    shape = shape if expert_overlap is None else shape.with_overlap(expert_overlap)
    shape = shape.in_fp8() if quantization == "fp8" else shape
    heads = {"eagle3": eagle3_acceptance, "block": block_acceptance}
    options = PlanOptions(
        gpu=find_gpu(gpu),
        target=shape,
        draft=find_draft(draft, shape),
        acceptance=parse_acceptance(acceptance),
        loads=parse_loads(load, seed),
        requests=parse_requests(requests),
        systems=parse_systems(systems),
        exit_signal=parse_exit_signal(exit_signal),
        head_acceptance={name: parse_acceptance(given) for name, given in heads.items() if given is not None},
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        table=table,
        max_requests=max_requests,
        seed=seed,
    )
    if save_table is not None:
        modeled_table(Pair(options.gpu, options.target, options.draft)).save(save_table)
    with ProgressBar() as bar:
        found = make_plan(options, bar)
    if report is not None:
        try:
            report.write_text(render_page(found))
        except OSError as error:
            raise ConfigError(f"the report {report} cannot be written: {reason_of(error)}") from error
    print(found.to_json() if as_json else render_text(found))
