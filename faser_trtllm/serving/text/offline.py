"""In-process text generation without a server, which runs all prompts as one batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.errors import FaserError
from faser_trtllm.executor.executor import Executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.finish_reason import SYNTHETIC
from faser_trtllm.serving.text.request import TextOutput, TextRequest
from faser_trtllm.serving.text.service import TextGenerator


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. Field names are the JSON keys of `faser generate --json`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_pruned_rows: int
    seconds: float  # since all prompts were submitted
    synthetic_acceptance: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; synthetic_acceptance only if true, since the text is then not the target's."""
        return {name: value for name, value in asdict(self).items() if name != SYNTHETIC or value}


def generate_all(
    executor: Executor, engine_dir: Path, prompts: Sequence[str], fields: Mapping[str, Any]
) -> Iterator[Completion]:
    """Run prompts on an executor that was not started; yield answers in order. fields: of TextRequest, for all."""
    engines = EngineDir.load(engine_dir)
    generator = TextGenerator(executor, Tokenizer.load(engines.tokenizer_dir, engines.vocab_size))
    finals: dict[int, tuple[TextOutput, float]] = {}
    started_s = time.perf_counter()

    def collect(index: int) -> Any:
        return lambda output: finals.__setitem__(index, (output, time.perf_counter() - started_s))

    for index, prompt in enumerate(prompts):
        request = TextRequest(text=prompt, stream=False, exclude_input_in_output=True, **fields)
        generator.compile_guide(request)
        generator.submit(str(index), request, collect(index))
    emitted = 0
    while emitted < len(prompts):
        if emitted in finals:
            output, seconds = finals.pop(emitted)
            emitted += 1
            yield _completion(output, seconds)
        elif not executor.step():
            raise FaserError(f"prompt {emitted} got no answer although the executor is idle; please report this bug")


def _completion(output: TextOutput, seconds: float) -> Completion:
    if output.error is not None:
        raise output.error
    statistics = output.statistics
    assert statistics is not None
    assert output.finish_reason is not None
    return Completion(
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        num_output_tokens=statistics.num_output_tokens,
        num_draft_tokens=statistics.num_draft_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
        num_pruned_rows=statistics.num_pruned_rows,
        seconds=round(seconds, 6),
        synthetic_acceptance=statistics.is_synthetic,
    )
