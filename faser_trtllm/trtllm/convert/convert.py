"""Convert a TensorRT-LLM configuration to ours, key by key, with a report; no key is dropped silently.

Sources are the YAML of the LLM API (trtllm-serve's --config, the model.yaml of its Triton models), an engine's
config.json and a build_config file of TensorRT-LLM 1.2 to 1.4, which is not imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from faser_trtllm.config import ServiceConfig, parse, read_mapping
from faser_trtllm.errors import ConfigError
from faser_trtllm.trtllm.convert.kv_cache import KV_CACHE
from faser_trtllm.trtllm.convert.rules import BUILD, ENGINE_CONFIG, LLM_API, SCHEDULER
from faser_trtllm.trtllm.convert.speculation import FIELDS
from faser_trtllm.trtllm.convert.verdict import (
    Outcome,
    Rules,
    Section,
    Verdict,
    join,
    nearest,
    plain,
    refusal,
    show,
    unknown,
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The verdict on every key, and the resulting settings. source: "llm_api", "engine_config", "build_config" or
    "flags". serve: nested settings of faser.yaml. build: options of `faser build` by name.
    """

    source: str
    verdicts: tuple[Verdict, ...]
    serve: Mapping[str, Any]
    build: Mapping[str, Any]

    @property
    def refusals(self) -> tuple[str, ...]:
        return tuple(verdict.reason for verdict in self.verdicts if verdict.outcome is Outcome.REFUSED)

    def check(self) -> None:
        """Raise ConfigError with the first refusal, if any."""
        if self.refusals:
            more = f" ({len(self.refusals) - 1} more keys are refused)" if len(self.refusals) > 1 else ""
            raise ConfigError(self.refusals[0] + more)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "refused": len(self.refusals),
            "keys": [verdict.as_dict() for verdict in self.verdicts],
            "serve": dict(self.serve),
            "build": dict(self.build),
        }

    def as_text(self) -> str:
        """Return the report with one line per key."""
        return "\n".join(str(verdict) for verdict in self.verdicts)


def convert(data: Mapping[Any, Any]) -> Conversion:
    """Judge every key of a TensorRT-LLM configuration. Never raises; refusals are verdicts."""
    source, rules = _source(data)
    return gather(source, _walk(data, rules, ""))


def gather(source: str, judged: Iterable[Verdict]) -> Conversion:
    """Combine verdicts into a Conversion; a key that contradicts an earlier one is refused."""
    verdicts = tuple(_without_conflicts(judged))
    serve: dict[str, Any] = {}
    build: dict[str, Any] = {}
    for verdict in verdicts:
        build |= verdict.build
        for name, value in verdict.serve.items():
            section, _, key = name.rpartition(".")
            (serve.setdefault(section, {}) if section else serve)[key] = value
    return Conversion(source, verdicts, serve, build)


def is_trtllm(data: Mapping[Any, Any]) -> bool:
    """Return True for a configuration of TensorRT-LLM: some keys exist only there, and none only in faser.yaml.

    A misspelt key counts as the key that it resembles. Keys that exist in both mean the same.
    """
    ours, theirs = set(_our_names(ServiceConfig)), set(_their_names(LLM_API)) | set(ENGINE_CONFIG) | set(BUILD)
    known = ours | theirs
    names = set()
    for name in _names(data):
        close = [name] if name in known else difflib.get_close_matches(name, known, n=1)
        names.update(close)
    return bool(names - ours) and not names - theirs


def read_config(
    path: Path | None, overrides: Mapping[str, Any] | None = None
) -> tuple[ServiceConfig, Conversion | None]:
    """Read a faser.yaml or convert a TensorRT-LLM configuration, then apply overrides (None values are ignored).

    Return the configuration, and the conversion, if any. Raises ConfigError, also for a refused key.
    """
    data = read_mapping(path) if path is not None else {}
    conversion = convert(data) if is_trtllm(data) else None
    if conversion is not None:
        conversion.check()
        data = dict(conversion.serve)
    for key, value in (overrides or {}).items():
        if isinstance(value, Mapping) and isinstance(data.get(key), dict):
            data[key] = data[key] | value
        elif value is not None:
            data[key] = value
    return parse(ServiceConfig, data), conversion


def _source(data: Mapping[Any, Any]) -> tuple[str, Rules]:
    if "pretrained_config" in data:
        return "engine_config", ENGINE_CONFIG
    names = set(map(str, data))
    if names & (set(BUILD) - set(LLM_API)) and not names & (set(LLM_API) - set(BUILD)):
        return "build_config", BUILD
    return "llm_api", LLM_API


def _walk(data: Mapping[Any, Any], rules: Rules, section: str) -> Iterator[Verdict]:
    for name, value in data.items():
        key = join(section, name)
        rule = rules.get(name) if isinstance(name, str) else None
        if rule is None:
            yield unknown(key, value, _meant(name, section, rules))
        elif value is None:
            yield Verdict(key, None, Outcome.IGNORED, "it is not set")
        elif callable(rule):
            yield rule(key, value)
        elif not isinstance(value, Mapping):
            yield refusal(key, value, f"{key} is {show(value)}; it must be a mapping of keys to values")
        elif not value:
            yield Verdict(key, {}, Outcome.IGNORED, "it is empty")
        elif isinstance(rule, Section):
            yield from rule.judge(key, value)
        else:
            yield from _walk(value, rule, key)


def _meant(name: Any, section: str, rules: Rules) -> str:
    """Return the key that an unknown one may stand for: a key of another section, or a similar one.

    For "kv_cache_config.kv_cache_dtype" it is "kv_cache_config.dtype".
    """
    text = str(name)
    for other, keys in (("kv_cache_config", KV_CACHE), ("scheduler_config", SCHEDULER), ("speculative_config", FIELDS)):
        for key in (text, text.removeprefix(other.removesuffix("config")), text.removeprefix(f"{other}_")):
            if key in keys and (other, key) != (section, text):
                return f"{other}.{key}"
    return nearest(text, rules)


def _without_conflicts(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Refuse the second of two keys that map to the same setting with different values."""
    said: dict[tuple[str, str], Verdict] = {}
    for verdict in verdicts:
        for place, values in (("serve", verdict.serve), ("build", verdict.build)):
            for name, value in values.items():
                first = said.setdefault((place, name), verdict)
                there = getattr(first, place)[name]
                if there != value:
                    sentence = (
                        f"{verdict.key} is {show(plain(verdict.value))}, but {first.key} says {show(there)}; keep one"
                    )
                    verdict = refusal(verdict.key, verdict.value, sentence)
        yield verdict


def _names(data: Mapping[Any, Any], depth: int = 0) -> Iterator[str]:
    """Yield dotted names of keys, including those inside sections."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value and depth == 0 and name in ("kv_cache_config", "scheduler_config"):
            yield from (f"{name}.{inner}" for inner in _names(value, 1))
        else:
            yield str(name)


def _their_names(rules: Rules) -> Iterator[str]:
    yield from rules
    for section in ("kv_cache_config", "scheduler_config"):
        keys = rules[section]
        assert isinstance(keys, Mapping)
        yield from (f"{section}.{key}" for key in keys)


def _our_names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{inner}" for inner in _our_names(field.annotation))
