"""All commands with their line of help, so that `faser --help` imports none of them."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from faser_trtllm.checkout import import_from_checkout

if TYPE_CHECKING:
    import typer

HELP_FLAGS = ("-h", "--help")
HELP_WIDTH = 80  # columns


class Command(NamedTuple):
    """A command: its "module:function", and the first line of the function's docstring.

    The module is part of this package, or of `lab` in a checkout. It may define EXAMPLES, which help shows after the
    options, and CONTEXT, settings of its typer context.
    """

    place: str
    help: str


COMMANDS = {
    "bench": Command("benches:bench", "Run a benchmark: peers, policies, the service, endurance, host, GPUs."),
    "build": Command("build:build", "Compile a target and a draft checkpoint into engines."),
    "check": Command("check:check", "Check an engine directory, or the installed TensorRT-LLM."),
    "convert": Command("convert:convert", "Convert a TensorRT-LLM configuration and report on each key."),
    "generate": Command("generate:generate", "Generate text without a server; all prompts run as one batch."),
    "openai": Command("openai:openai", "Serve OpenAI's completions and chat API in front of Triton."),
    "plan": Command("lab.planner.command:plan", "Simulate the gain from speculation on a GPU that you do not have."),
    "profile": Command("profile:profile", "Measure what drafting and verification cost on this machine."),
    "serve": Command("serve:serve", "Serve engines with NVIDIA Triton until SIGTERM, then drain."),
    "top": Command("top:top", "Watch a running server: requests, acceptance, cache and latencies."),
    "trtllm-serve": Command("trtllm_serve:trtllm_serve", "Run TensorRT-LLM's own OpenAI server with our drafter."),
    "version": Command("version:version", "Print the version and the CPU engine's instruction set."),
}


def listing(usage: str, about: str, rows: Mapping[str, str]) -> str:
    """Return a help text that lists commands. rows: name -> line of help."""
    indent = max(map(len, rows)) + 4
    lines = [f"Usage: {usage} COMMAND [OPTIONS]", "", *textwrap.wrap(about, HELP_WIDTH), "", "Commands:"]
    for name, text in rows.items():
        lines += textwrap.wrap(f"  {name:<{indent - 2}}{text}", HELP_WIDTH, subsequent_indent=" " * indent)
    return "\n".join([*lines, "", f"Run `{usage} COMMAND --help` for options and examples."])


def load(name: str) -> typer.Typer:
    """Import typer and a command's module, and return the command's application."""
    import typer

    module, function = import_command(name)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    context = {"help_option_names": HELP_FLAGS, **getattr(module, "CONTEXT", {})}
    app.command(epilog=getattr(module, "EXAMPLES", None), context_settings=context)(function)
    return app


def import_command(name: str) -> tuple[Any, Callable[..., None]]:
    """Import and return a command's module and its function."""
    place, _, function = COMMANDS[name].place.partition(":")
    if place.startswith("lab."):
        module = import_from_checkout(place, f"faser {name}")
    else:
        module = importlib.import_module(f"{__package__}.{place}")
    return module, getattr(module, function)
