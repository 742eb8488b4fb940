"""Convert TensorRT-LLM's speculative_config.

Draft models, EAGLE-3 and Medusa heads, block drafters (DFlash, DSpark), MTP layers and n-grams are supported; other
methods are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from faser_trtllm.models.heads.unsupported import UNSUPPORTED
from faser_trtllm.trtllm.convert.kv_cache import EXPERTS
from faser_trtllm.trtllm.convert.verdict import (
    BOOLEAN,
    TEXT,
    Outcome,
    Rule,
    Verdict,
    became,
    ignored,
    join,
    nearest,
    only,
    refusal,
    refused,
    show,
    unknown,
    whole,
)

OURS = (
    "only Draft_Target (a separate draft model), Eagle3 and Medusa (heads on the target), DFlash and DSpark (block "
    "drafters), MTP (the target's own layer) and NGram (the request's own text) are supported"
)
_KINDS = {
    "drafttarget": "",
    "userprovided": "a drafter is an object, which a file cannot hold; inside TensorRT-LLM use "
    "faser_trtllm.trtllm.drafter.FaserDrafter",
    "auto": "it picks a method without a draft model",
    "eagle": "",
    "eagle3": "",
    "medusa": "",
    "mtp": "",
    "lookahead": "it drafts without a draft model",
    "ngram": "",
    "sa": "",
    "dflash": "",
    "dspark": "",
    **{kind.lower().replace("-", ""): UNSUPPORTED[kind] for kind in ("PARD", "P-EAGLE", "LiLiCorr", "Domino")},
    "savestate": "it only records hidden states",
}
_NAMES = (
    *("Draft_Target", "User_Provided", "AUTO", "Eagle", "Eagle3", "Medusa", "MTP", "Lookahead", "NGram", "SA"),
    *("PARD", "DFlash", "DSpark", "Domino", "LiLiCorr", "SaveState"),
)
_GATE = "the policy decides on speculation in every step; nothing turns it off permanently"


def _draft_len(key: str, value: Any) -> Verdict:
    verdict = became(whole(1), serve="max_draft_len", build="max_draft_len")(key, value)
    if verdict.outcome is Outcome.REFUSED:
        return verdict
    note = "an upper bound: the policy chooses each request's length (speculation: fixed:K for one length)"
    return Verdict(key, value, Outcome.BECAME, note, verdict.serve, verdict.build)


_RULES: dict[str, Rule] = {
    "decoding_type": ignored("a draft model drafts, as by default"),
    "max_draft_len": _draft_len,
    "max_total_draft_tokens": ignored("drafts are a chain, so it equals max_draft_len"),
    "speculative_model": became(TEXT, build="draft_checkpoint_dir"),
    "speculative_model_dir": became(TEXT, build="draft_checkpoint_dir"),
    "load_format": only("auto", otherwise="weights are read from the checkpoint; leave it out"),
    "acceptance_window": ignored(_GATE),
    "acceptance_length_threshold": ignored(_GATE),
    "acceptance_rate_window_size": ignored(_GATE),
    "acceptance_rate_threshold": ignored(_GATE),
    **dict.fromkeys(
        ("allow_advanced_sampling", "advanced_sampling_mode", "use_rejection_sampling", "enable_penalty"),
        ignored("sampled requests always speculate, with the target's exact distribution"),
    ),
    **dict.fromkeys(("moe_backend", "moe_tactic"), EXPERTS),
    "speculative_model_subfolder": refused("name that folder in speculative_model"),
    "spec_dec_variant": ignored("the checkpoint says which variant it is"),
}
_ANY_LENGTH = ignored("the longest match counts, of whatever length")
_OWN_TEXT = ignored("a request's own prompt and output are searched, no other's")
_SUFFIX = ("ngram", "sa")  # decoding types that search the text
_SUFFIX_RULES: dict[str, Rule] = {
    "max_matching_ngram_size": _ANY_LENGTH,
    "is_keep_all": ignored("of several continuations the most frequent is drafted"),
    "is_use_oldest": ignored("of equally frequent continuations the latest is drafted"),
    **dict.fromkeys(("is_public_pool", "enable_global_pool", "global_pool_size"), _OWN_TEXT),
}
_ONE_CHAIN = ignored("one chain is drafted and no tree, which changes no text")


def _layers_left(key: str, value: Any) -> Verdict:
    """Convert layers whose outputs TensorRT-LLM reads to the layers whose inputs `faser build` reads."""
    layers = list(value) if isinstance(value, (list, tuple, set)) else []
    if not layers or not all(whole(0).accepts(layer) for layer in layers):
        return refusal(key, value, f"{key} is {show(value)}; it must list layers from 0 on")
    note = "hidden rows that leave a layer enter the next"
    return Verdict(key, value, Outcome.BECAME, note, build={"eagle3_layers": [layer + 1 for layer in sorted(layers)]})


def _beside_suffix(key: str, value: Any) -> Verdict:
    note = "the text's drafts are taken where they are at least as sure as the head's"
    return Verdict(key, value, Outcome.BECAME, note, {"drafters": ["suffix", "model"]})


def _beside_suffix_if_true(key: str, value: Any) -> Verdict:
    return _beside_suffix(key, value) if value else Verdict(key, value, Outcome.IGNORED, "it is the default")


_HEAD = ignored("the checkpoint says what drafter it is; cpu and cuda engines take it")
_EAGLE_RULES: dict[str, Rule] = {
    "decoding_type": _HEAD,
    "eagle3_layers_to_capture": _layers_left,
    "eagle3_model_arch": only("llama3", otherwise="a head's layer is one of the Llama family here; use such a head"),
    "eagle3_one_model": ignored("head and target share KV blocks, and each has an engine"),
    "num_eagle_layers": ignored("each draft is a step of the head"),
    "spec_dec_variant": only(3, otherwise="only EAGLE-3 heads are supported; use one of them"),
    "sa_config": _beside_suffix,
    "greedy_sampling": ignored("greedy and sampled requests speculate, with the target's exact distribution"),
    "posterior_threshold": refused("acceptance by a threshold changes the text's distribution; leave it out"),
    **dict.fromkeys(
        ("eagle_choices", "use_dynamic_tree", "dynamic_tree_max_topK", "max_non_leaves_per_layer"), _ONE_CHAIN
    ),
}
_MEDUSA_RULES: dict[str, Rule] = {
    "decoding_type": _HEAD,
    "max_draft_len": ignored("it counts a tree's drafts; the chain has at most one of each head"),
    "max_total_draft_tokens": ignored("it counts a tree's drafts; the chain has at most one of each head"),
    "num_medusa_heads": ignored("the checkpoint says how many heads there are"),
    "medusa_choices": _ONE_CHAIN,
}


def _slots(key: str, value: Any) -> Verdict:
    """Convert shift_label; true means that a block's first row drafts, too."""
    if not BOOLEAN.accepts(value):
        return refusal(key, value, f"{key} is {show(value)}; it must be {BOOLEAN.says}")
    note = "which row of a block drafts first"
    return Verdict(key, value, Outcome.BECAME, note, build={"block_slots": "anchor" if value else "mask"})


_OF_CHECKPOINT = ignored("config.json of the checkpoint says it")
_ROWS = ignored("the policy chooses which drafts are verified, by calibrated margins and the costs of faser profile")
_BLOCK_RULES: dict[str, Rule] = {
    "decoding_type": _HEAD,
    "target_layer_ids": _layers_left,
    "shift_label": _slots,
    **dict.fromkeys(("mask_token_id", "block_size", "markov_rank"), _OF_CHECKPOINT),
    "markov_head_type": only(
        "vanilla", otherwise="only DSpark's vanilla Markov head is supported; use a drafter with it"
    ),
    **dict.fromkeys(
        (
            *("enable_confidence_head", "confidence_threshold", "enable_confidence_scheduling"),
            *("confidence_cost_table_path", "confidence_calibration_path", "confidence_min_predicted_gain"),
            "enable_fused_confidence_scheduler",
        ),
        _ROWS,
    ),
    **dict.fromkeys(
        ("attention_backend", "context_recompute_tail", "skip_ctx_buffer_budget_check"),
        ignored("context rows are kept per KV token, and the engine has its own kernels"),
    ),
}
_RELAXED = ignored("only relaxed acceptance reads it")
_MTP_RULES: dict[str, Rule] = {
    "num_nextn_predict_layers": _draft_len,
    "speculative_model": refused("the MTP layer is read from the target's checkpoint; leave it out"),
    "speculative_model_dir": refused("the MTP layer is read from the target's checkpoint; leave it out"),
    "use_relaxed_acceptance_for_thinking": only(
        False, otherwise="relaxed acceptance changes the text's distribution; leave it out"
    ),
    **dict.fromkeys(
        ("relaxed_topk", "relaxed_delta", "begin_thinking_phase_token", "end_thinking_phase_token"), _RELAXED
    ),
    "use_mtp_vanilla": ignored("one layer drafts all places, and the checkpoint says how many layers there are"),
    "mtp_eagle_one_model": _EAGLE_RULES["eagle3_one_model"],
    "sa_config": _beside_suffix,
    "use_sa_spec": _beside_suffix_if_true,
    "sa_spec_threshold": ignored("the text's drafts are taken where they are surer, whatever their match's length"),
    **dict.fromkeys(("use_dynamic_tree", "dynamic_tree_max_topK"), _ONE_CHAIN),
}
_OF_KIND = {
    **dict.fromkeys(_SUFFIX, _SUFFIX_RULES),
    **dict.fromkeys(("eagle", "eagle3"), _EAGLE_RULES),
    "medusa": _MEDUSA_RULES,
    **dict.fromkeys(("dflash", "dspark"), _BLOCK_RULES),
    "mtp": _MTP_RULES,
}
_SCHEDULED = ("draft_len_schedule", "max_concurrency")
FIELDS = (*_RULES, *_SCHEDULED, *dict.fromkeys(name for rules in _OF_KIND.values() for name in rules))


def judge_speculation(key: str, section: Mapping[Any, Any]) -> Iterable[Verdict]:
    """Yield a verdict per key of speculative_config. key: the dotted name of the section."""
    kind = section.get("decoding_type")
    refused_kind = _refused_kind(f"{key}.decoding_type", kind, section.get("method"))
    if refused_kind is not None:
        yield refused_kind
        for name, value in section.items():
            if name != "decoding_type":
                yield Verdict(join(key, name), value, Outcome.IGNORED, "decoding_type is refused")
        return
    short = str(kind).lower().replace("_", "")
    searches = short in _SUFFIX
    rules = _RULES | _OF_KIND.get(short, {})
    is_mtp = short == "mtp"
    max_draft_len = section.get("max_draft_len")
    if is_mtp and max_draft_len is None:
        max_draft_len = section.get("num_nextn_predict_layers") or 1  # TensorRT-LLM's default
    if max_draft_len is None and rules["max_draft_len"] is _RULES["max_draft_len"]:
        sentence = f"{key}.max_draft_len is missing; drafting needs the number of tokens to draft; set it"
        yield refusal(f"{key}.max_draft_len", None, sentence)
    for name, value in section.items():
        path = join(key, name)
        if value is None:
            if name != "max_draft_len":
                yield Verdict(path, None, Outcome.IGNORED, "it is not set")
        elif name == "max_total_draft_tokens" and rules[name] is _RULES[name] and value != max_draft_len:
            yield refusal(
                path,
                value,
                f"{path} is {show(value)}; drafts are a chain here, so it must be max_draft_len ({max_draft_len})",
            )
        elif name == "num_nextn_predict_layers" and is_mtp and value != max_draft_len:
            yield refusal(
                path,
                value,
                f"{path} is {show(value)} and max_draft_len {show(max_draft_len)}, but both say how many tokens are "
                "drafted; leave one out",
            )
        elif name == "decoding_type" and is_mtp:
            yield _mtp(path, value, section)
        elif name == "decoding_type" and searches:
            yield Verdict(path, value, Outcome.BECAME, "the suffix automaton drafts", {"drafters": ["suffix"]})
        elif name in rules:
            yield rules[name](path, value)
        elif name not in _SCHEDULED:
            yield unknown(path, value, nearest(name, (*rules, *_SCHEDULED)))
    if short == "medusa":  # a chain has one draft of each head
        max_draft_len = section.get("num_medusa_heads")
    yield from _schedule(key, section, max_draft_len, is_tree=short == "medusa")


def _mtp(path: str, value: Any, section: Mapping[Any, Any]) -> Verdict:
    note = "the layer in the target's own checkpoint drafts, in cpu and cuda engines"
    is_given = any(section.get(name) is not None for name in ("max_draft_len", "num_nextn_predict_layers"))
    length = {} if is_given else {"max_draft_len": 1}
    return Verdict(path, value, Outcome.BECAME, note, length, {"mtp": True, **length})


def _refused_kind(path: str, kind: Any, method: Any) -> Verdict | None:
    """Refuse a decoding_type that is not supported, else return None. method: vLLM's key for it, if given."""
    if kind is None and method is not None:
        ours = "decoding_type, speculative_model and max_draft_len in place of method, model and num_speculative_tokens"
        return refusal(path, None, f"{path} is missing, and method ({show(method)}) is vLLM's; write {ours}")
    if kind is None:
        return refusal(path, None, f"{path} is missing; {OURS}")
    reason = _KINDS.get(str(kind).lower().replace("_", ""))
    if reason is None:
        close = nearest(kind, _NAMES)
        hint = f"did you mean {close}?" if close else OURS
        return refusal(path, kind, f"{path} is {show(kind)}, which is unknown; {hint}")
    return refusal(path, kind, f"{path} is {show(kind)}; {reason}; {OURS}") if reason else None


def _schedule(key: str, section: Mapping[Any, Any], max_draft_len: Any, *, is_tree: bool) -> Iterable[Verdict]:
    """Convert draft_len_schedule and max_concurrency to one table of lengths by batch size. is_tree: their lengths
    count a tree's drafts."""
    given = {join(key, name): section[name] for name in _SCHEDULED if section.get(name) is not None}
    if given and is_tree and not whole(1).accepts(max_draft_len):
        for path, value in given.items():
            sentence = (
                f"{path} needs {key}.num_medusa_heads, the length of a chain, which is {show(max_draft_len)}; set it"
            )
            yield refusal(path, value, sentence)
        return
    if not given or not whole(1).accepts(max_draft_len):
        for path, value in given.items():
            yield Verdict(path, value, Outcome.IGNORED, "max_draft_len is refused")
        return
    if is_tree and section.get("draft_len_schedule") is not None:
        path = f"{key}.draft_len_schedule"
        sentence = f"{path} counts drafts of a tree, but a chain has one draft of each head; leave it out"
        yield refusal(path, section["draft_len_schedule"], sentence)
        return
    schedule = _with_whole_keys(section.get("draft_len_schedule"))
    limit = section.get("max_concurrency")
    table = {1: max_draft_len}
    if schedule is not None:
        path = f"{key}.draft_len_schedule"
        sentence = _wrong_schedule(path, schedule, max_draft_len)
        if sentence:
            yield refusal(path, schedule, sentence)
            return
        table = dict(sorted(schedule.items()))
    if limit is not None:
        path = f"{key}.max_concurrency"
        if not whole(0).accepts(limit):
            yield refusal(path, limit, f"{path} is {show(limit)}; it must be {whole(0).says}")
            return
        table = {size: length for size, length in table.items() if size <= limit} | {limit + 1: 0}
    spelling = "schedule:" + ",".join(f"{size}={length}" for size, length in table.items())
    for path, value in given.items():
        yield Verdict(path, value, Outcome.BECAME, _in_words(table), {"speculation": spelling})


def _with_whole_keys(schedule: Any) -> Any:
    """Convert JSON's string keys to int."""
    if not isinstance(schedule, Mapping):
        return schedule
    return {
        int(k) if isinstance(k, str) and k.isascii() and k.isdecimal() and len(k) < 10 else k: v
        for k, v in schedule.items()
    }


def _wrong_schedule(path: str, schedule: Any, max_draft_len: int) -> str:
    """Return why this is no schedule of release 1.2, where a length applies from its batch size on; "" if it is."""
    entries = list(schedule.items()) if isinstance(schedule, Mapping) else []
    if not entries or not all(whole(1).accepts(size) and whole(0).accepts(length) for size, length in entries):
        return f"{path} is {show(schedule)}; it must map batch sizes from 1 on to draft lengths from 0 on"
    if max(schedule.values()) > max_draft_len:
        return (
            f"{path} has the length {max(schedule.values())}; it must be at most max_draft_len ({max_draft_len}); "
            "lower the length or raise max_draft_len"
        )
    if 1 not in schedule:
        fixed = {1: 0}
        for size, length in sorted(schedule.items()):
            fixed |= {max(fixed): length, size + 1: 0}
        return (
            f"{path} is {show(dict(schedule))}; it must have batch size 1, which release 1.2 requires; if its keys are "
            f"upper bounds, as in releases after 1.2, write {fixed}"
        )
    if schedule[1] != max_draft_len:
        return (
            f"{path} gives batch size 1 the length {schedule[1]}; release 1.2 requires max_draft_len ({max_draft_len}) "
            "there; set it to that"
        )
    return ""


def _in_words(table: Mapping[int, int]) -> str:
    """Return "batch sizes 1 to 7 draft 4, 8 and more draft 0" for {1: 4, 8: 0}."""
    sizes = list(table)
    parts = []
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        span = (
            f"{size} and more"
            if following is None
            else str(size)
            if following == size + 1
            else f"{size} to {following - 1}"
        )
        parts.append(f"{span} draft {table[size]}")
    return f"batch sizes {', '.join(parts)} (a length applies from its key on)"


def judge_decoding_mode(key: str, value: Any) -> Verdict:
    """Judge speculative_decoding_mode of trtllm-build, by name or by config.json's number (1 and 2)."""
    name = str(value).lower().removeprefix("speculativedecodingmode.")
    if name in ("none", "1", "draft_tokens_external", "2"):
        return Verdict(key, value, Outcome.IGNORED, "faser build takes the draft checkpoint instead")
    return refusal(key, value, f"{key} is {show(value)}; only draft_tokens_external is supported; {OURS}")
