"""Attack a service with the worst request of every input, and watch a second client's stream.

Each case is sent repeatedly while a second client, in its own process, continuously requests a few tokens; for
comparison the same is done with as many plain sequences of the same lengths (none if the case is refused). The rule:
the second client's first tokens and gaps take at most twice as long or 100 ms longer at p99, at most 500 ms (or twice
as long as in the comparison), its text is the same, and the engine process lives. A case that breaks the rule is run
again alone, up to three times. Then requests wait in a fresh engine process with one slot, where each may hold 16 times
its body and 4 MiB. The exit code is 1 if a case breaks the rule.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bystander.attack import Attacker
from benchmarks.bystander.canary import Canary
from benchmarks.bystander.cases import BASE, Case, all_cases
from benchmarks.bystander.memory import measure_held
from benchmarks.bystander.report import Rest, as_dict, render_markdown
from benchmarks.bystander.runner import describe, run_cases
from benchmarks.bystander.service import Service
from benchmarks.common.environment import describe_environment
from benchmarks.common.flags import Flags, say
from faser_trtllm.errors import InvalidArgumentError

EXAMPLE = """Example:
  faser build --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft --max_batch_size 160 \\
    --max_seq_len 1024 --output_dir engines/built/bystander
  faser bench bystander --engine_dir engines/built/bystander --output_dir bench_results"""
_REST_S = 30.0


@dataclass(frozen=True)
class BystanderOptions:
    """Options of `faser bench bystander`. engine_dir: with slots for two times 64 sequences and one more."""

    engine_dir: Path
    output_dir: Path
    seconds: float = 1.0
    cases: str = ""
    speculation: str = "fixed:4"
    num_held: int | None = None
    command_line: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    flags = Flags("bystander", BystanderOptions, __doc__, EXAMPLE)
    flags.flag("engine_dir", "a directory that `faser build` wrote, for a batch of 130 or more")
    flags.flag("output_dir", "directory for bystander.json and bystander.md")
    flags.flag("seconds", "seconds of each attack, and of each run without it")
    flags.flag("cases", "run only cases with this in their names")
    flags.flag("speculation", "policy of the service; a fixed length is the same in two runs")
    flags.flag("num_held", "number of cases whose memory is measured; default: all that are served")
    options = flags.parse(argv)
    if options.seconds <= 0:
        raise InvalidArgumentError(f"is {options.seconds:g}; it must be more than 0", "seconds", options.seconds)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    cases = [case for case in all_cases() if options.cases in case.name]
    log_file = options.output_dir / "server.log"
    with Service(options.engine_dir, log_file, speculation=options.speculation) as service:
        with Attacker(service.http_port, service.grpc_port) as attacker, Canary(service.grpc_url) as canary:
            _touch_the_cache(attacker)
            before = service.engine_rss_bytes()
            outcomes = []
            for number, case in enumerate(cases, 1):
                pid = service.engine_pid
                outcomes += run_cases([case], attacker, canary, seconds=options.seconds, engine_pid=pid, log=say)
                say(f"{number} of {len(cases)}, {case.name}: {describe(outcomes[-1])}")
        time.sleep(_REST_S)
        rest = Rest(before, service.engine_rss_bytes())
    served = [outcome.case for outcome in outcomes if not outcome.sent.is_refused]
    helds = []
    with Service(options.engine_dir, log_file, speculation=options.speculation, max_batch_size=1) as service:
        for case in served[: options.num_held]:
            helds.append(measure_held(case, service))
            say(f"{case.name} waits: {helds[-1]}")
    environment = describe_environment(options.command_line)
    (options.output_dir / "bystander.json").write_text(
        json.dumps(as_dict(outcomes, helds, rest, environment), indent=1)
    )
    report = render_markdown(outcomes, helds, rest, environment)
    (options.output_dir / "bystander.md").write_text(report)
    print(report)
    return 0 if all(outcome.is_kept for outcome in outcomes) else 1


def _touch_the_cache(attacker: Attacker) -> None:
    """Use all blocks of the KV cache, which take memory on first use."""
    prompt = {"text_input": "def f(x): " * 30, "num_return_sequences": 64, "max_tokens": 700}
    for number in range(2):
        attacker.run(Case("first use", {**BASE, **prompt, "cache_salt": str(number), "temperature": 1.0}), 0.1)


if __name__ == "__main__":
    sys.exit(main())
