"""`faser bench moe`: policies on random mixtures of experts, in real time."""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import CpuMeter, describe_environment, portable
from benchmarks.common.profile_lines import profile_lines
from benchmarks.moe.model import TOKENIZER, VOCAB_SIZE, write_moe_checkpoint
from benchmarks.moe.options import BY_ROWS, MAX_DRAFT_LEN, PRICE, MoeBenchOptions
from benchmarks.moe.report import Cell, Count, MoeModel, MoeReport
from benchmarks.moe.systems import System, open_system
from benchmarks.peers.bits.models import Model, write_random_checkpoint
from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.engine_dir import ENGINE_FILE
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_curve import read_samples
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.fingerprint import PROFILE
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import profile_engine_dir

DRAFT_SIZES = (1, 128, 256, VOCAB_SIZE)  # layers, hidden size, MLP size, vocabulary, with a negligible cost
NUM_SEQUENCES, NUM_TOKENS = 24, 64  # of the measured overlap
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """A model, its engines and their costs; by_rows: costs without experts."""

    model: MoeModel
    engine_dir: Path
    routing: Routing
    by_rows: CostTable


def run_moe_bench(options: MoeBenchOptions, say: Progress) -> MoeReport:
    """Measure, and write moe.json and moe.md into options.output_dir after every cell."""
    options.validate()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    environment, meter = describe_environment(options.command_line), CpuMeter()
    start_s = time.monotonic()
    with ExitStack() as stack:
        folder = options.models_dir
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-moe-")))
        models = [prepare(options, folder, scale, say) for scale in options.embedding_scales]
        report = MoeReport({}, _options_dict(options), tuple(built.model for built in models), (), 0.0)
        for built in models:
            for acceptance in options.acceptance:
                with ExitStack() as systems:
                    opened = _open_systems(options, built, acceptance, systems)
                    for batch_size in options.batch_sizes:
                        cell = _measure(options, built, acceptance, batch_size, opened)
                        report = replace(
                            report,
                            environment=environment | meter.shares(),
                            cells=(*report.cells, cell),
                            minutes=(time.monotonic() - start_s) / 60.0,
                        )
                        report.write(options.output_dir)
                        ratio = cell.to_best("price")
                        say(
                            f"{cell.model}, accepted {acceptance:g}, batch {batch_size}: price is {ratio.mean:.3f} "
                            f"± {ratio.error:.3f} of {cell.best}; {report.minutes:.1f} minutes"
                        )
    return report


def prepare(options: MoeBenchOptions, folder: Path, embedding_scale: float, say: Progress) -> Built:
    """Write, build and profile a model unless the folder has it."""
    sizes = options.sizes
    name = f"{sizes.num_layers}x{sizes.hidden_size}-{sizes.num_experts}x{sizes.expert_size}-e{embedding_scale:g}"
    say(f"{name}: writing, building and profiling what is not there yet")
    target = write_moe_checkpoint(folder / name, sizes, embedding_scale)
    draft = folder / "draft"
    if not draft.exists():
        write_random_checkpoint(draft, TOKENIZER, DRAFT_SIZES, max_seq_len=sizes.max_seq_len)
    engines = build_engines(
        BuildOptions(
            target,
            draft,
            folder / f"{name}-{options.quantization.replace(':', '-')}",
            max_batch_size=options.max_batch_size,
            max_num_tokens=max(256, options.max_batch_size * (1 + MAX_DRAFT_LEN)),
            max_seq_len=options.max_seq_len,
            max_draft_len=MAX_DRAFT_LEN,
            quantization=options.quantization,
            quantize_lm_head=options.quantization != "none",
        )
    )
    assert engines is not None
    table = _profile(options, engines.path, say)
    overlap = measure_overlap(engines.path, options)
    routing = table.routing or Routing(sizes.num_experts, sizes.top_k, overlap)
    say(f"{name}: overlap {overlap:.3f}, by the profile {routing.overlap:.3f} and {routing.across:.3f}")
    model = MoeModel(
        name,
        embedding_scale,
        overlap,
        (routing.overlap, routing.across),
        Model(name, target).num_weights(),
        (engines.path / "target" / ENGINE_FILE).stat().st_size,
        dict(table.held_out_errors),
    )
    return Built(model, engines.path, routing, by_rows(engines.path / PROFILE))


def measure_overlap(engine_dir: Path, options: MoeBenchOptions) -> float:
    """Return the share of a row's experts that the next row of the same random text uses, too."""
    with (
        CoreSet(options.cores, options.num_threads) as core_set,
        CpuEngine.open(
            engine_dir / "target" / ENGINE_FILE,
            core_set,
            num_blocks=NUM_TOKENS // 16,
            tokens_per_block=16,
            max_batch_size=1,
            max_num_tokens=NUM_TOKENS,
        ) as engine,
    ):
        batch = BatchBuilder(np.arange(NUM_TOKENS // 16, dtype=np.int32).reshape(1, -1))

        def run(tokens: Any, first: int, end: int) -> float:
            batch.clear()
            batch.add(0, tokens, first, end, 1)
            engine.forward(batch.build())
            return engine.distinct_experts

        found = []
        for number in range(NUM_SEQUENCES):
            tokens = np.random.default_rng(number).integers(1, VOCAB_SIZE, NUM_TOKENS).astype(np.int32)
            run(tokens, 0, NUM_TOKENS - 2)
            found.append(run(tokens, NUM_TOKENS - 2, NUM_TOKENS))
        return 2.0 - statistics.fmean(found) / options.sizes.top_k


def _profile(options: MoeBenchOptions, engine_dir: Path, say: Progress) -> CostTable:
    """Return the directory's table, measured if it has none."""
    path = engine_dir / PROFILE
    if not path.exists():
        profile = profile_engine_dir(
            ProfileOptions(
                engine_dir,
                quick=options.quick_profile,
                cores=options.cores,
                num_threads=options.num_threads,
                time_budget_s=options.profile_s,
                prompt_len=options.prompt_len,
                max_tokens=min(32, options.max_tokens),
                num_prompts=4,
            )
        )
        for line in profile_lines(profile):
            say(line)
    return CostTable.read(path)


def by_rows(path: Path) -> CostTable:
    """Fit a table to a profile's samples as if its model had no experts."""
    table, data = CostTable.read(path), json.loads(path.read_text())
    samples, held_out = (
        [replace(sample, num_experts=0.0) for sample in read_samples(data[key])] for key in ("samples", "held_out")
    )
    return CostTable.fit(
        samples,
        table.fingerprint,
        held_out=held_out,
        interference=table.interference,
        overhead_ms=table.overhead_ms,
    )


def _open_systems(options: MoeBenchOptions, built: Built, acceptance: float, stack: ExitStack) -> list[System]:
    systems = []
    for name, spelling in options.systems().items():
        table = built.by_rows if name == BY_ROWS else None
        systems.append(open_system(name, spelling, built.engine_dir, acceptance, options, stack, table))
    gc.collect()  # collect now, so that no system is charged for it
    gc.freeze()
    stack.callback(gc.unfreeze)
    return systems


def _measure(
    options: MoeBenchOptions, built: Built, acceptance: float, batch_size: int, systems: Sequence[System]
) -> Cell:
    """Measure one cell. The first block is a warm-up, which also drops slow fixed lengths."""
    order = random.Random(f"{options.seed}/{built.model.name}/{acceptance}/{batch_size}")
    running = list(systems)
    for system in running:
        system.begin(batch_size, batch_size)
        if system.name in (PRICE, BY_ROWS):  # a server learns once, and then serves for hours
            system.turn(options.learning_s)
    # The first block has all systems, later ones fewer.
    num_left = min(len(running), 3 + options.num_fixed_kept)
    block_s = options.seconds / (len(running) + num_left * options.blocks)
    first = _block(running, block_s, options.slice_ms / 1e3, order)
    fixed = sorted((name for name in first if name.startswith("fixed:")), key=lambda name: -first[name])
    slow = set(fixed[options.num_fixed_kept :])
    running = [system for system in running if system.name not in slow]
    blocks = [_block(running, block_s, options.slice_ms / 1e3, order) for _ in range(options.blocks)]
    counts: dict[tuple[int, int], tuple[int, float]] = {}
    for system in systems:
        system.end()
        for key, (number, total) in system.passes.counts.items():
            before = counts.get(key, (0, 0.0))
            counts[key] = (before[0] + number, before[1] + total)
    return Cell(
        built.model.name,
        acceptance,
        batch_size,
        {system.name: tuple(block[system.name] for block in blocks) for system in running},
        tuple(
            Count(*key, number, total / number, float(built.routing.distinct_of(key[1], key[0])))
            for key, (number, total) in sorted(counts.items())
        ),
    )


def _block(systems: Sequence[System], least_s: float, slice_s: float, order: random.Random) -> dict[str, float]:
    """Run turns until each system has run least_s, and return tokens/s."""
    tokens, seconds = (dict.fromkeys((system.name for system in systems), 0.0) for _ in range(2))
    while waiting := [system for system in systems if seconds[system.name] < least_s]:
        order.shuffle(waiting)
        for system in waiting:
            count, took_s = system.turn(slice_s)
            tokens[system.name] += count
            seconds[system.name] += took_s
    return {name: tokens[name] / seconds[name] for name in tokens}


def _options_dict(options: MoeBenchOptions) -> dict[str, Any]:
    """Return options for JSON, with defaults resolved and without machine-specific folders."""
    values = asdict(options) | {"cores": options.pinned_cores(), "num_threads": options.threads()}
    del values["command_line"], values["models_dir"]
    return {name: portable(str(value)) if isinstance(value, Path) else value for name, value in values.items()}
