"""Specify a guide, which the output of a request must match."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError

MAX_GUIDE_BYTES = 64 << 10
GUIDE_FIELD = "guided_decoding_guide"
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")


@dataclass(frozen=True, slots=True)
class GuideSpec:
    """A guide that a client asked for."""

    guide_type: str  # one of GUIDE_TYPES
    guide: str = ""  # the schema, regex or grammar; "" for the type json: any object or array


def guide_spec(guide_type: str | None, guide: str | None) -> GuideSpec | None:
    """Make a spec from TensorRT-LLM's two inputs, None if neither is given; raise InvalidArgumentError if invalid.

    Empty strings count as not given, because TensorRT-LLM's clients send them.
    """
    if not guide_type:
        if guide:
            raise InvalidArgumentError(
                "was sent without guided_decoding_guide_type, which says what it is; send one of "
                f"{', '.join(GUIDE_TYPES)}",
                GUIDE_FIELD,
            )
        return None
    if guide_type not in GUIDE_TYPES:
        raise InvalidArgumentError(
            f"is {guide_type[:40]}, allowed are {', '.join(GUIDE_TYPES)}",
            "guided_decoding_guide_type",
            guide_type,
            ", ".join(GUIDE_TYPES),
        )
    guide = guide or ""
    if guide_type == "json" and guide:
        raise InvalidArgumentError(
            "was sent with the type json, which is any JSON; leave it out or use json_schema", GUIDE_FIELD
        )
    if guide_type != "json" and not guide:
        raise InvalidArgumentError(f"is missing, the type {guide_type} needs one", GUIDE_FIELD)
    num_bytes = len(guide.encode(errors="replace"))
    if num_bytes > MAX_GUIDE_BYTES:
        raise InvalidArgumentError(
            f"has {num_bytes} bytes, allowed are at most {MAX_GUIDE_BYTES}; shorten it",
            GUIDE_FIELD,
            num_bytes,
            MAX_GUIDE_BYTES,
        )
    return GuideSpec(guide_type, guide)
