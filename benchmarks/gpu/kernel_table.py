"""Write plugins/cuda/KERNELS.md: every kernel's code, launches, and modeled and measured times, from its cubins.

The cases are those of the section "kernels" of `faser bench gpu`, launched on tensors without memory. --check: write
nothing, exit with 1 if the page is old.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.kernels import expected
from benchmarks.gpu.kernels.checks import FAMILIES
from benchmarks.gpu.kernels.expected import RecordedCase
from benchmarks.gpu.kernels.passes import CLAIMS, measured
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.ops.cuda.compiler import nvcc_version, source_dir
from lab.costmodel.gpu import find_gpu

ARCH, NUM_SMS = "sm_90", 132
PAGE = source_dir() / "KERNELS.md"
RUNS = ("h100", "h200_before", "h200")
HEAD = """# Kernels by the numbers

`faser bench gpu.kernel_table` writes this page from the kernels as nvcc {nvcc} compiles them for {arch} and from what
the ops launch on {num_sms} SMs. `tests/benchmarks/gpu/test_kernel_table.py` compares it with the code. Only *measured*
columns are a GPU's times: those of an H100 and an H200 on 2026-11-26 (`benchmarks/gpu/kernels/measured.json` has their
commits). Attention and sampling changed between *before* and *after*; the H100 ran them as before. Attention of few
requests has shorter chunks since. `-`: not measured.

## Code

Instructions are the cubin's, without padding. *Loop*: those of an iteration of the inner loop of matrix instructions,
and the number of these; attention's takes {walk} positions. Blocks per SM: as many as registers, shared memory and
threads allow.
"""
LAUNCHES = """## Launches

A row is a case of the section `kernels` of `faser bench gpu`. Blocks: of each launch. Waves: of the first. *Least*: us
of an H100 that moves every byte once at 0.9 of the specified bandwidth, or computes. *Modeled*: us by
`benchmarks/gpu/kernels/expected.py`, where a launch takes {launch} us, an item of attention {item} us and an
instruction of its loop {instruction} ns, the memory gives {share} of its bandwidth, and an SM issues {issued:.0f} warp
instructions a us where sampling reads logits by parts. These constants were fitted to the measurements. Of top_p, and
of sampling by one block per row, it has launches and bytes only. Contexts include the new rows: 513 and 517 are those
of passes at 512. Attention has a merging launch where a tile's last block would read too much, which an engine decides
by its `max_seq_len`.
"""
PASSES = """## Passes

*Modeled*, ms: the kernels above in each layer; products and everything else (LM head, acceptance, gaps, host) as
measured on that GPU. *Launches*: of a layer, or of acceptance. *Goal*: for the H100. The H100 was measured before the
changes, the H200 after them but for short chunks. An 8B has a vocabulary of 4,096 on the H100 and 128,256 on the H200.
"""


def page() -> str:
    """Return the whole page."""
    options = GpuBenchOptions(Path(), Path(), Path())
    cases = expected.recorded(options, FAMILIES, NUM_SMS)
    nvcc = ".".join(map(str, nvcc_version()))
    head = HEAD.format(nvcc=nvcc, arch=ARCH, num_sms=NUM_SMS, walk=expected.WALK_TOKENS)
    launches = LAUNCHES.format(
        launch=expected.LAUNCH_US,
        item=expected.ITEM_US,
        instruction=expected.INSTRUCTION_NS,
        share=expected.MEMORY_SHARE,
        issued=expected.ISSUED_PER_US,
    )
    parts = [head, *_codes(cases), launches]
    for op in FAMILIES:
        parts += [f"### {op}\n", *_launches([each for each in cases if each.case.op == op])]
    return "\n".join([*parts, PASSES, *_passes(cases)]) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"]


def _codes(cases: Sequence[RecordedCase]) -> list[str]:
    threads = {(each.code(ARCH), each.num_threads) for case in cases for each in case.launches}
    rows = [
        (
            f"`{code.kernel}`",
            code.registers,
            code.spill_bytes,
            code.shared_bytes,
            num_threads,
            code.blocks_per_sm(num_threads),
            code.instructions,
            f"{code.walk} ({code.walk_mma})" if code.walk else "",
        )
        for code, num_threads in sorted(threads, key=lambda pair: pair[0].kernel)
    ]
    header = ("kernel", "registers", "spilled B", "shared B", "threads", "blocks per SM", "instructions", "loop (mma)")
    return _table(header, rows)


def _launches(cases: Sequence[RecordedCase]) -> list[str]:
    h100, h200 = find_gpu("h100"), find_gpu("h200")
    rows = []
    for each in cases:
        case, first = each.case, each.launches[0]
        places = NUM_SMS * first.code(ARCH).blocks_per_sm(first.num_threads)
        times = measured()["kernels_us"].get(case.op, {}).get(case.shape, {})
        rows.append(
            (
                case.shape,
                " + ".join(str(launch.num_blocks) for launch in each.launches),
                f"{first.num_blocks / places:.2f}",
                f"{1e-3 * case.num_bytes:.0f}",
                f"{expected.roofline_us(case, h100):.1f}",
                *(f"{expected.modeled_us(each, gpu, ARCH):.1f}" for gpu in (h100, h200)),
                *(times.get(run, "-") for run in RUNS),
            )
        )
    header = ("shape", "blocks", "waves", "KB", "least", "modeled H100", "H200")
    return _table((*header, "measured H100 before", "H200 before", "after"), rows)


def _passes(cases: Sequence[RecordedCase]) -> list[str]:
    gpus, rows = ("h100", "h200"), []
    times = {gpu: expected.times_of(cases, find_gpu(gpu), ARCH) for gpu in gpus}
    launches = {(each.case.op, each.case.shape): len(each.launches) for each in cases}
    for claim in CLAIMS:
        found = [claim.measured_ms(gpu) for gpu in gpus]
        rows.append(
            (
                claim.name,
                sum(launches[case] for case in claim.cases) + claim.num_products,
                claim.goal_ms,
                *(f"{claim.modeled_ms(times[gpu], gpu):.2f}" for gpu in gpus),
                *("-" if ms is None else f"{ms:.2f}" for ms in found),
            )
        )
    return _table(("what", "launches", "goal", "modeled H100", "H200", "measured H100", "H200"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="faser bench gpu.kernel_table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is old")
    options, wanted = parser.parse_args(argv), page()
    if options.check:
        if not PAGE.is_file() or PAGE.read_text() != wanted:
            print(f"{PAGE.name} is old; run faser bench gpu.kernel_table", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
