"""`faser check --trtllm`: a table and a verdict on what is installed, here the generated stand-ins, some broken."""

import inspect
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm import cli
from faser_trtllm.config import CapacitySchedulerPolicy, SchedulerKind
from lab.trtllm_check.api_surface import Symbol, load_entries, signature
from lab.trtllm_check.conformance import Finding, compare, parse_signature
from lab.trtllm_check.tiny_model import run_tiny_model
from tests.trtllm import fakes, rules, rules_py

ALGORITHMS = "tensorrt_llm.bindings.internal.algorithms"
BATCH_MANAGER = "tensorrt_llm.bindings.internal.batch_manager"
SURFACE = load_entries("1.2")


@pytest.fixture
def check(monkeypatch, capsys):
    """Runs `faser check` with arguments -> exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["faser", "check", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return run


def changed(name, **fields):
    return SURFACE | {name: replace(SURFACE[name], **fields)}


def test_without_the_package_it_is_one_sentence_and_exit_code_2(check, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err = check("--trtllm")
    assert (code, out) == (2, "")
    assert err.startswith("faser: the package tensorrt_llm is missing")
    assert err.count("\n") == 1


def test_another_version_is_one_sentence_and_exit_code_2(check, monkeypatch):
    fakes.install(monkeypatch, version="1.5.0")
    code, _, err = check("--trtllm")
    assert code == 2
    assert err.startswith(
        "faser: TensorRT-LLM 1.5.0 is installed, and FaserDrafter is not written for it: its classes are recorded up to"
    )
    assert err.count("\n") == 1


def test_nothing_to_check_is_one_sentence(check):
    code, _, err = check()
    assert code == 2
    assert err == "faser: there is nothing to check; give --engine_dir, or --trtllm for TensorRT-LLM\n"


def test_what_is_as_recorded_passes(check, monkeypatch):
    fakes.install(monkeypatch)
    code, out, _ = check("--trtllm")
    lines = out.splitlines()
    assert lines[0] == "TensorRT-LLM 1.2.1, against the contracts recorded for 1.2"
    assert lines[1].startswith("scheduler: recorded from the public source of the 1.2 line")
    assert lines[2].startswith("drafter: recorded from")
    assert all(line.startswith("ok ") for line in lines[3:-1])
    assert len(lines[3:-1]) > len(SURFACE) + 30
    assert lines[-1].startswith(f"verdict: all {len(lines) - 4} checks are as recorded")
    assert code == 0


@pytest.mark.parametrize("version", ["1.3.0rc22", "1.4.0rc1"])
def test_of_a_later_release_only_the_drafter_is_compared(check, monkeypatch, version):
    fakes.install(monkeypatch, version=version)
    code, out, _ = check("--trtllm")
    lines = out.splitlines()
    assert lines[0] == f"TensorRT-LLM {version}, against the contracts recorded for {version[:3]}"
    assert lines[2] == f"scheduler: none is recorded for {version[:3]}; scheduler: trtllm is for 1.2"
    assert {tuple(line.split()[:2]) for line in lines[3:-1]} == {("ok", "drafter")}
    assert code == 0


SCHEDULER, REQUEST, CACHE = (
    f"{ALGORITHMS}.CapacityScheduler",
    f"{BATCH_MANAGER}.LlmRequest",
    f"{BATCH_MANAGER}.KVCacheManager",
)
DRAFTER, POLICIES = (
    "tensorrt_llm._torch.speculative.drafter.Drafter",
    "tensorrt_llm.bindings.executor.CapacitySchedulerPolicy",
)
WITHOUT_FREE = {"methods": {k: v for k, v in SURFACE[CACHE].methods.items() if k != "remove_sequence"}}
BROKEN = {
    "argument gone": (
        SCHEDULER,
        {"init": SURFACE[SCHEDULER].init[:2]},
        "__init__: argument has_kv_cache_manager is gone",
    ),
    "argument new": (
        SCHEDULER,
        {"init": ["strict", *SURFACE[SCHEDULER].init]},
        "argument strict is new and has no default",
    ),
    "order": (DRAFTER, {"init": SURFACE[DRAFTER].init[::-1]}, "__init__: the order of its arguments differs"),
    "default": (
        DRAFTER,
        {"init": ["max_draft_len: int = 3", *SURFACE[DRAFTER].init[1:]]},
        "max_draft_len has the default 3",
    ),
    "unnamed": (
        CACHE,
        {"methods": dict(SURFACE[CACHE].methods) | {"add_token": ["request_id: int", "count: int", "/"]}},
        "add_token: takes 2 to 2 arguments, recorded are 1",
    ),
    "method gone": (CACHE, WITHOUT_FREE, "method remove_sequence is gone"),
    "attribute renamed": (
        REQUEST,
        {"read_only": [name.replace("num_draft_tokens", "draft_length") for name in SURFACE[REQUEST].read_only]},
        "attribute num_draft_tokens is gone",
    ),
    "attribute fixed": (
        f"{BATCH_MANAGER}.ContextChunkingConfig",
        {"read_write": {"chunking_policy": "ContextChunkingPolicy"}, "read_only": ["chunk_unit_size"]},
        "attribute chunk_unit_size cannot be written",
    ),
    "argument of another type": (
        CACHE,
        {"init": [a.replace("size_per_head: int", "size_per_head: list[int]") for a in SURFACE[CACHE].init]},
        "argument size_per_head is of type collections.abc.Sequence[int], recorded is int",
    ),
    "argument renamed": (
        CACHE,
        {"init": [a.replace("size_per_head", "size_per_head_per_layer") for a in SURFACE[CACHE].init]},
        "__init__: argument size_per_head is gone",
    ),
    "unnamed argument of another type": (
        CACHE,
        {"methods": dict(SURFACE[CACHE].methods) | {"rewind_kv_cache": ["request_id: int", "lengths: list[int]", "/"]}},
        "rewind_kv_cache: argument rewind_lengths is of type",
    ),
    "attribute of another type": (
        f"{BATCH_MANAGER}.ContextChunkingConfig",
        {"read_write": {"chunking_policy": "str", "chunk_unit_size": "int"}},
        "attribute chunking_policy is of type str, recorded is ContextChunkingPolicy",
    ),
    "value gone": (POLICIES, {"values": ["GUARANTEED_NO_EVICT", "STATIC_BATCH"]}, "value MAX_UTILIZATION is gone"),
}


@pytest.mark.parametrize(("name", "fields", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_package_that_differs_is_named(name, fields, problem, monkeypatch):
    fakes.install(monkeypatch, modules=bare(changed(name, **fields)))
    differing = [finding for finding in compare(SURFACE) if finding.problems]
    assert [finding.name for finding in differing] == [name]
    assert problem in "; ".join(differing[0].problems)


def bare(surface):
    """Stand-ins without behavior, of which any name may be missing."""
    known = rules.BEHAVIORS | rules_py.behaviors("1.2")
    functions = {name: known[name] for name in known if SURFACE[name].kind == "function"}
    return fakes.build(surface=surface, behaviors=dict.fromkeys(known) | functions)


def test_a_name_that_is_gone_is_named(monkeypatch):
    modules = fakes.install(monkeypatch)
    del modules["tensorrt_llm.llmapi"].LLM
    assert Finding("tensorrt_llm.llmapi.LLM", ("it is gone",)) in compare(SURFACE)


class ThinRequest:
    """A request of 1.4 with what FaserDrafter uses, except for its room for drafts, and with something new."""

    def __init__(self, *args, **kwargs):
        self.py_request_id = self.py_orig_prompt_len = self.py_max_new_tokens = self.py_new = 0
        self.py_draft_tokens = []
        self.py_disable_speculative_decoding = False
        self.is_attention_dp_dummy = self.is_cuda_graph_dummy = self.is_dummy_request = False


def test_a_field_of_requests_that_is_gone_is_named(check, monkeypatch):
    """The check compares those fields of 1.4's requests that FaserDrafter uses, and no others."""
    modules = fakes.install(monkeypatch, version="1.4.0rc1")
    modules["tensorrt_llm._torch.pyexecutor.llm_request"].LlmRequest = ThinRequest
    code, out, _ = check("--trtllm")
    assert code == 1
    assert [line.partition(": ")[2] for line in out.splitlines() if line.startswith("DIFFERS")] == [
        "attribute py_draft_pages_allocated is gone"
    ]
    assert out.splitlines()[-1].endswith("do not use FaserDrafter with this version")


def test_a_class_that_has_moved_within_a_release_is_found_where_it_was(check, monkeypatch):
    modules = fakes.install(monkeypatch, version="1.4.0rc1")
    home = "tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2"
    monkeypatch.setitem(sys.modules, home, None)
    code, out, _ = check("--trtllm")
    assert (code, f"{home} cannot be imported" in out) == (1, True)
    monkeypatch.setitem(sys.modules, "tensorrt_llm._torch.pyexecutor.kv_cache_manager_v2", modules[home])
    assert check("--trtllm")[0] == 0


def test_a_broken_api_surface_ends_with_exit_code_1(check, monkeypatch):
    members = {name: member for name, member in vars(rules.KVCacheManager).items() if name != "remove_sequence"}
    without_free = type("WithoutFree", (), {n: m for n, m in members.items() if n not in ("__dict__", "__weakref__")})
    fakes.install(monkeypatch, surface=changed(CACHE, **WITHOUT_FREE), behaviors={CACHE: without_free})
    code, out, _ = check("--trtllm")
    assert code == 1
    assert f"DIFFERS scheduler  {CACHE}: method remove_sequence is gone" in out
    assert "DIFFERS run        tiny model, GUARANTEED_NO_EVICT: it raises AttributeError" in out
    assert f"first {CACHE} (method remove_sequence is gone); do not use scheduler: trtllm" in out.splitlines()[-1]


def test_a_rule_that_is_another_shows_in_the_vectors(check, monkeypatch):
    class Unaligned(rules.MicroBatchScheduler):
        def _first_come_first_served(self, requests, capacity, unit):
            super()._first_come_first_served(requests, capacity, 1)

    fakes.install(monkeypatch, behaviors={f"{ALGORITHMS}.MicroBatchScheduler": Unaligned})
    code, out, _ = check("--trtllm")
    assert code == 1
    wrong = [line for line in out.splitlines() if line.startswith("DIFFERS")]
    assert {line.split()[1] for line in wrong} == {"vector"}, "the tokens stay what they are"
    assert any("chunks-aligned-down: the schedule is" in line for line in wrong)


def test_a_cache_that_hands_out_a_block_twice_shows_in_the_run(check, monkeypatch):
    class Sharing(rules.KVCacheManager):
        def get_cache_block_ids(self, request_id, window_size):
            return [[0] * len(self._sequences[request_id].blocks)]

    fakes.install(monkeypatch, behaviors={CACHE: Sharing})
    code, out, _ = check("--trtllm")
    assert code == 1
    assert "DIFFERS run        tiny model, MAX_UTILIZATION: it raises AssertionError" in out


def test_the_tiny_model_sees_pauses_chunks_and_acceptance(monkeypatch):
    fakes.install(monkeypatch)
    run = run_tiny_model(SchedulerKind.TRTLLM, CapacitySchedulerPolicy.MAX_UTILIZATION)
    assert min(run.num_paused, run.num_chunks, run.num_accepted) > 0
    assert all(len(tokens) == 20 for tokens in run.tokens.values())


def test_signatures_as_nanobind_writes_them():
    text = (
        "def __call__(self, active_requests: collections.abc.Sequence[tuple[int, str]], kind: Kind = Kind.A, "
        "limit: int | None = None, flag: bool = \\0, *, name: str = 'a, b)') -> tuple[list[int], list[int]]"
    )
    parsed = parse_signature(text, (True,))
    assert [p.name for p in parsed] == ["active_requests", "kind", "limit", "flag", "name"]
    assert parsed[0].default is inspect.Parameter.empty
    assert parsed[1].default == Symbol("Kind.A")
    assert parsed[3].default is True
    assert parsed[4].kind is inspect.Parameter.KEYWORD_ONLY
    assert [p.kind for p in parse_signature("add_token(self, arg: int, /) -> None")] == [
        inspect.Parameter.POSITIONAL_ONLY
    ]
    assert parse_signature("def start(self) -> None") == []


identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in ("self", "_"))


@given(
    st.lists(identifiers, unique=True, max_size=6),
    st.integers(0, 6),
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)), min_size=6, max_size=6),
)
def test_what_nanobind_writes_is_read_back(names, first_default, defaults):
    written = [n if i < first_default else f"{n}={defaults[i]!r}" for i, n in enumerate(names)]
    recorded = signature(written)
    text, _, *values = fakes.nanobind_signature("f", recorded)
    assert [(p.name, p.default) for p in parse_signature(text, values)] == [
        (p.name, p.default) for p in recorded.parameters.values()
    ]
