"""`faser build`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from faser_trtllm.builder.options import BuildOptions
from faser_trtllm.commands.options import FOREIGN_FLAGS, is_given, numbers, own_flags
from faser_trtllm.commands.progress import ProgressBar
from faser_trtllm.errors import FaserError, InvalidArgumentError, reason_of

if TYPE_CHECKING:
    from faser_trtllm.builder.engine_dir import EngineDir

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
CONTEXT = FOREIGN_FLAGS
EXAMPLES = (
    "Examples: faser build --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir engines/built/demo; the same with --backend tensorrt_rtx --output_dir engines/built/demo_rtx. "
    "Flags and configurations of trtllm-build are accepted, too; those without a counterpart are refused by name."
)


def _with_build_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter **options of a command by one typer option for each field of BuildOptions."""
    signature = inspect.signature(command, eval_str=True)
    kinds = get_type_hints(BuildOptions, include_extras=True)
    options = []
    for field in dataclasses.fields(BuildOptions):
        kind: Any
        kind, text = get_args(kinds[field.name])
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if isinstance(default, tuple):  # given as text, separated by commas
            kind, default = str, ""
        elif field.name in ("checkpoint_dir", "draft_checkpoint_dir"):  # a configuration may name them
            kind, default = Path | None, None
        flag = "--compute_capability" if field.name == "compute_capabilities" else f"--{field.name}"
        annotation = Annotated[kind, typer.Option(flag, help=text)]
        options.append(inspect.Parameter(field.name, _KEYWORD, default=default, annotation=annotation))
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[own[0], *options, *own[1:]])  # type: ignore[attr-defined]
    return command


@_with_build_options
def build(
    ctx: typer.Context,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "--extra_llm_api_options",
            "--build_config",
            help="a configuration of TensorRT-LLM; flags on the command line override it",
        ),
    ] = None,
    no_profile: Annotated[
        bool, typer.Option("--no_profile", help="skip the quick profile that --speculation auto needs")
    ] = False,
    **options: Any,
) -> None:
    """Compile a target and a draft checkpoint into engines.

    Engines that this machine can run are profiled for a few seconds, which gives speculation auto the cost of drafts.
    """
    from faser_trtllm.builder.build import build_engines
    from faser_trtllm.trtllm.convert.tokenizer import check_tokenizer

    for name in ("exit_layers", "eagle3_layers"):
        options[name] = numbers(name, options[name])
    options["compute_capabilities"] = tuple(filter(None, map(str.strip, options["compute_capabilities"].split(","))))
    given = _from_trtllm(ctx, config)
    tokenizer = given.pop("tokenizer", None)
    options |= given
    if options["checkpoint_dir"] is None:
        raise InvalidArgumentError("checkpoint_dir is missing; name the target checkpoint with --checkpoint_dir")
    check_tokenizer({"tokenizer": tokenizer}, options["checkpoint_dir"])
    built = BuildOptions(**options)
    with ProgressBar() as progress:
        engines = build_engines(built, progress, lambda sentence: print(sentence, file=sys.stderr))
    print(f"{'checked' if built.dry_run else 'built'} {built.output_dir}", file=sys.stderr)
    if engines is not None and not no_profile:
        _profile(engines)


def _profile(engines: EngineDir) -> None:
    """Run the quick profile. If it fails, print a warning and keep the engines."""
    from faser_trtllm.profiling.ensure import can_measure, measure_once

    if not can_measure(engines):
        return
    try:
        with ProgressBar() as progress:
            seconds = measure_once(engines.path, progress=progress)
    except KeyboardInterrupt:
        print(f"not profiled; `faser profile --quick --engine_dir {engines.path}` does it later", file=sys.stderr)
        raise
    except (FaserError, OSError) as error:
        print(f"not profiled ({reason_of(error)}); speculation auto will be fixed:4", file=sys.stderr)
        return
    if seconds is not None:
        print(f"profiled in {seconds:.0f} s", file=sys.stderr)


def _from_trtllm(ctx: typer.Context, config: Path | None) -> dict[str, Any]:
    """Return fields of BuildOptions from a configuration and from flags that only trtllm-build has; report on stderr.

    Fields whose own flag was given are left out.
    """
    from faser_trtllm.config import read_mapping
    from faser_trtllm.trtllm.convert.convert import convert
    from faser_trtllm.trtllm.convert.flags import BUILD_FLAGS, judge_flags

    flags = judge_flags(ctx.args, BUILD_FLAGS, own_flags(ctx))
    if flags.positional:
        raise InvalidArgumentError(f"{flags.positional[0]!r} is one argument too many; every setting has a flag")
    given: dict[str, Any] = {}
    conversions = [flags.conversion]
    if config is not None:
        conversions.insert(0, convert(read_mapping(config)))
    for conversion in conversions:
        conversion.check()
        if conversion.verdicts:
            print(conversion.as_text(), file=sys.stderr)
        given |= conversion.build
    for name in ("checkpoint_dir", "draft_checkpoint_dir"):
        if name in given:
            given[name] = Path(given[name])
    if "eagle3_layers" in given:
        given["eagle3_layers"] = tuple(given["eagle3_layers"])
    return {name: value for name, value in given.items() if not is_given(ctx, name)}
