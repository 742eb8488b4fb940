"""`faser generate`."""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faser_trtllm.checkout import import_from_checkout
from faser_trtllm.commands.options import EngineDirOption
from faser_trtllm.config import (
    BRANCHES,
    DEFAULT_SPECULATION,
    DETERMINISTIC,
    DRAFTERS,
    SPELLINGS,
    ExecutorConfig,
    parse,
)
from faser_trtllm.core.request_field import Row, rows
from faser_trtllm.core.sampling_params import SamplingFields
from faser_trtllm.errors import InvalidArgumentError, reason_of

if TYPE_CHECKING:
    from faser_trtllm.engine.opening import Opener

DEFAULT_MAX_TOKENS = 64
EXAMPLES = 'Example: faser generate --engine_dir engines/built/demo --prompt "def fibonacci(n):" --max_tokens 64 --json'


def _with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter **sampling of a command by one typer option for each sampling parameter of OpenAI's API."""
    signature = inspect.signature(command, eval_str=True)
    options = [
        inspect.Parameter(
            row.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULT_MAX_TOKENS if row.name == "max_tokens" else row.default,
            annotation=Annotated[
                _kind_of(row) | None,
                typer.Option(f"--{row.name}", help=row.help.replace("`", "")),
            ],
        )
        for row in rows(SamplingFields)
        if row.openai
    ]
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def _kind_of(row: Row) -> Any:
    return types.GenericAlias(list, (row.kind,)) if row.is_list else row.kind


@_with_sampling_options
def generate(
    engine_dir: EngineDirOption,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="a prompt; may be given several times")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt_file", help="one prompt per line; JSON strings if the line starts with a quote"),
    ] = None,
    stop_words: Annotated[list[str] | None, typer.Option("--stop_words", help="stop word; may be repeated")] = None,
    guided_json: Annotated[
        str | None, typer.Option("--guided_json", help="a JSON schema that the output follows, or its file")
    ] = None,
    guided_regex: Annotated[
        str | None, typer.Option("--guided_regex", help="a regex that the output matches, or its file")
    ] = None,
    speculation: Annotated[str, typer.Option("--speculation", help=SPELLINGS)] = DEFAULT_SPECULATION,
    drafters: Annotated[str | None, typer.Option("--drafters", help=DRAFTERS)] = None,
    num_branches: Annotated[int, typer.Option("--num_branches", help=BRANCHES)] = 0,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="CPU threads; default: all cores")] = None,
    quantization: Annotated[
        str,
        typer.Option("--quantization", help="none, or fp8 for cuda engines on GPUs of compute capability 8.9 or more"),
    ] = "none",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv_cache_dtype", help="auto, or fp8 for cuda engines, which halves the KV cache")
    ] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help=DETERMINISTIC)] = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="write a Chrome/Perfetto trace of the steps")] = None,
    interpret: Annotated[
        bool,
        typer.Option(
            "--interpret", help="run the networks of a TensorRT engine on the CPU, slowly; needs the checkpoints"
        ),
    ] = False,
    checkpoint_dir: Annotated[
        Path | None, typer.Option("--checkpoint_dir", help="with --interpret: the target's checkpoint")
    ] = None,
    draft_checkpoint_dir: Annotated[
        Path | None, typer.Option("--draft_checkpoint_dir", help="with --interpret: the draft's checkpoint")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per prompt")] = False,
    **sampling: Any,
) -> None:
    """Generate text without a server; all prompts run as one batch."""
    from faser_trtllm.executor.factory import open_executor
    from faser_trtllm.executor.trace import check_trace_file
    from faser_trtllm.guided.spec import GUIDE_FIELD
    from faser_trtllm.profiling.ensure import ensure_profile
    from faser_trtllm.serving.text.offline import generate_all
    from faser_trtllm.trtllm.convert.synthetic import with_forced_acceptance

    prompts, words = read_prompts(prompt, prompt_file), tuple(stop_words or ())
    for name, texts in {"prompt": prompts, "stop_words": words}.items():
        _check_text(name, texts)
    config = parse(
        ExecutorConfig,
        {
            "speculation": speculation,
            "drafters": drafters,
            "num_branches": num_branches,
            "num_threads": num_threads,
            "quantization": quantization,
            "kv_cache_config": {"dtype": kv_cache_dtype},
            "deterministic": deterministic,
            "trace_file": trace and str(trace),
        },
    )
    config = with_forced_acceptance(config, os.environ)
    if trace is not None:
        check_trace_file(trace, "trace")
    sampling = {name: tuple(v) or None if isinstance(v, list | tuple) else v for name, v in sampling.items()}
    fields = {**sampling, "stop_words": words, **read_guide(guided_json, guided_regex)}
    names = {GUIDE_FIELD: "guided_json" if guided_json is not None else "guided_regex"}
    opener = _opener(interpret, checkpoint_dir, draft_checkpoint_dir)
    ensure_profile(engine_dir, config)
    with open_executor(engine_dir, config, opener=opener) as executor:
        try:
            for completion in generate_all(executor, engine_dir, prompts, fields):
                print(json.dumps(completion.as_dict()) if as_json else completion.text, flush=True)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(error.sentence(names)) from error


def _opener(interpret: bool, checkpoint_dir: Path | None, draft_checkpoint_dir: Path | None) -> Opener:
    """Return the function that opens the engines; raise InvalidArgumentError if the flags do not fit together."""
    from faser_trtllm.engine.opening import open_engines

    if not interpret:
        for name, value in (("checkpoint_dir", checkpoint_dir), ("draft_checkpoint_dir", draft_checkpoint_dir)):
            if value is not None:
                raise InvalidArgumentError(
                    f"{name} is {value}, which only --interpret reads; add --interpret or leave {name} out"
                )
        return open_engines
    if checkpoint_dir is None:
        raise InvalidArgumentError(
            "checkpoint_dir is missing; --interpret needs the checkpoint that the target was built from; add "
            "--checkpoint_dir"
        )
    print(
        "faser: interpreting the TensorRT networks on the CPU, which is slow and only good for checking them",
        file=sys.stderr,
    )
    opener: Opener = import_from_checkout("lab.interpreted.open", "--interpret").Interpretation(
        checkpoint_dir, draft_checkpoint_dir
    )
    return opener


def _check_text(name: str, texts: Iterable[str]) -> None:
    """Raise InvalidArgumentError for bytes of the command line that are not UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"{name} is {text!r:.60}, whose character {error.start + 1} is not valid UTF-8; give it in UTF-8, or "
                "in --prompt_file as JSON"
            ) from None


def read_guide(guided_json: str | None, guided_regex: str | None) -> dict[str, str]:
    """Return the guide fields of TextRequest, {} without a flag; raise InvalidArgumentError if both flags are given."""
    if guided_json is not None and guided_regex is not None:
        raise InvalidArgumentError("guided_json and guided_regex were both given; give one of them")
    flag, guide_type, value = "guided_json", "json_schema", guided_json
    if guided_json is None:
        flag, guide_type, value = "guided_regex", "regex", guided_regex
    if value is None:
        return {}
    try:
        guide = Path(value).read_text().removesuffix("\n") if _is_file(value) else value
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"the file {value} of {flag} cannot be read: {reason_of(error)}") from error
    _check_text(flag, (guide,))
    return {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # too long for a path, or for a part of one
        return False


def read_prompts(prompt: list[str] | None, prompt_file: Path | None) -> list[str]:
    """Return the prompts of the flag that was given; raise InvalidArgumentError unless exactly one was."""
    if (prompt is None) == (prompt_file is None):
        raise InvalidArgumentError("give either --prompt or --prompt_file")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        lines = prompt_file.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"prompt_file {prompt_file} cannot be read: {reason_of(error)}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.startswith('"'):
            try:
                prompts.append(str(json.loads(line)))
            except json.JSONDecodeError as error:
                raise InvalidArgumentError(f"prompt_file line {number} is not a JSON string: {error}") from None
        else:
            prompts.append(line)
    if not prompts:
        raise InvalidArgumentError(f"prompt_file {prompt_file.name} holds no prompt")
    return prompts
