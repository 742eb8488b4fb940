"""Every command by name, with its one line of help: enough to print `faser --help` without importing any of them."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import typer

HELP_FLAGS = ("-h", "--help")
HELP_WIDTH = 80  # columns


class Command(NamedTuple):
    """place: "module:function" within this package. help: the first line of the function's docstring.

    The module may have EXAMPLES, shown below its options, and CONTEXT, settings of its typer context.
    """

    place: str
    help: str


COMMANDS = {
    "bench": Command("benches:bench", "Run a benchmark: peers, policies, the service, endurance, host, GPUs."),
    "build": Command("build:build", "Compile a target and a draft checkpoint into engines."),
    "check": Command("check:check", "Check an engine directory, or the installed TensorRT-LLM."),
    "convert": Command("convert:convert", "Report what becomes of a TensorRT-LLM configuration."),
    "generate": Command("generate:generate", "Generate text without a server; all prompts run as one batch."),
    "openai": Command("openai:openai", "Serve OpenAI's completions and chat API in front of Triton."),
    "plan": Command("plan:plan", "Simulate what speculation would bring on a GPU, before you have it."),
    "profile": Command("profile:profile", "Measure what drafting and verification cost on this machine."),
    "serve": Command("serve:serve", "Serve engines behind NVIDIA Triton until SIGTERM, then drain."),
    "top": Command("top:top", "Watch a running server: requests, acceptance, cache and latencies."),
    "trtllm-serve": Command("trtllm_serve:trtllm_serve", "Run TensorRT-LLM's own OpenAI server with our drafter."),
    "version": Command("version:version", "Print the version and the CPU engine's instruction set."),
}


def listing(usage: str, about: str, rows: Mapping[str, str]) -> str:
    """Help that lists commands, with a line of help each."""
    indent = max(map(len, rows)) + 4
    lines = [f"Usage: {usage} COMMAND [OPTIONS]", "", about, "", "Commands:"]
    for name, text in rows.items():
        lines += textwrap.wrap(f"  {name:<{indent - 2}}{text}", HELP_WIDTH, subsequent_indent=" " * indent)
    return "\n".join([*lines, "", f"Run `{usage} COMMAND --help` for options and examples."])


def load(name: str) -> typer.Typer:
    """The application of one command; imports typer and the command's module."""
    import typer

    module, function = import_command(name)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    context = {"help_option_names": HELP_FLAGS, **getattr(module, "CONTEXT", {})}
    app.command(epilog=getattr(module, "EXAMPLES", None), context_settings=context)(function)
    return app


def import_command(name: str) -> tuple[Any, Callable[..., None]]:
    """A command's module and its function."""
    place, _, function = COMMANDS[name].place.partition(":")
    module = importlib.import_module(f"{__package__}.{place}")
    return module, getattr(module, function)
