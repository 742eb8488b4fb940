"""Block drafters are opened as drafts of their target, by flags where config.json does not tell."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.source import open_sources
from faser_trtllm.errors import CheckpointError, InvalidArgumentError
from tests.support.block_drafter import LAYOUTS, make_block_drafter
from tests.support.checkpoints import make_checkpoint, make_pair
from tests.support.eagle3 import make_deepspec_head, make_head, make_speculators_head
from tests.support.medusa import make_medusa
from tests.support.moe_checkpoints import make_moe_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"), num_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_moe_checkpoint(tmp_path_factory.mktemp("mixture"), num_layers=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["target", "mixture"])
def test_a_block_drafter_is_opened_with_the_layers_that_it_reads(tmp_path, request, kind, layout):
    target = request.getfixturevalue(kind)
    drafter = make_block_drafter(tmp_path / "d", target, layout, layers=(0, 3, 4), num_layers=2)
    slots = "anchor" if layout == "specforge_dspark" else ""
    with ExitStack() as stack:
        of_target, draft = open_sources(target, drafter, 1, (2,), stack, block_slots=slots)
        assert of_target.read_layers == (0, 3, 4)
        assert draft.head.kind == "block"
        assert str(draft.head) == "a block drafter"
        assert (draft.config.num_layers, draft.segments) == (2, (0, 2))
        assert draft.checkpoint.tokenizer is of_target.checkpoint.tokenizer
        assert set(draft.stats()) == {"config.json", "model.safetensors"}
        assert draft.draft_window is None


HEADS = {
    "published": make_head,
    "speculators": make_speculators_head,
    "deepspec": lambda directory, target: make_deepspec_head(directory, target, layers=(0, 1, 2)),
    "medusa": make_medusa,
}


@pytest.mark.parametrize("layout", HEADS)
def test_heads_of_a_mixture_are_dense(tmp_path, mixture, layout):
    with ExitStack() as stack:
        of_target, draft = open_sources(mixture, HEADS[layout](tmp_path / "d", mixture), 1, (), stack)
        assert of_target.config.experts is not None
        assert draft.head is not None
        assert draft.config.experts is None


def test_an_expanded_target_is_read_at_the_same_places(tmp_path, target):
    drafter = make_block_drafter(tmp_path / "d", target, layers=(1, 4))
    with ExitStack() as stack:
        sources = open_sources(target, drafter, 3, (), stack)
        assert sources[0].config.num_layers == 12
        assert sources[0].read_layers == (3, 12)


def test_flags_say_which_slots_and_layers(tmp_path, target):
    drafter = make_block_drafter(tmp_path / "d", target, "specforge_dspark", layers=(1, 2), block_size=4)
    with pytest.raises(CheckpointError, match="say which with --block_slots anchor"):
        build_engines(BuildOptions(target, drafter, tmp_path / "e", dry_run=True))
    with ExitStack() as stack:
        head = open_sources(target, drafter, 1, (), stack, eagle3_layers=(2, 4), block_slots="mask")[1].head
        assert (head.config.first_slot, head.config.num_places, head.config.layers) == (1, 3, (2, 4))


def test_wrong_flags_are_refused(tmp_path, target):
    head = make_head(tmp_path / "h", target)
    _, draft = make_pair(tmp_path / "pair")
    for other in (head, draft, None):
        options = BuildOptions(target, other, tmp_path / "e", block_slots="mask", dry_run=True)
        with pytest.raises(
            InvalidArgumentError, match="block_slots is mask, but the draft checkpoint is no block drafter"
        ):
            build_engines(options)
    with pytest.raises(InvalidArgumentError, match=r"eagle3_layers is 1,2, but the draft .* and no block drafter"):
        build_engines(BuildOptions(target, draft, tmp_path / "e", eagle3_layers=(1, 2), dry_run=True))
    with pytest.raises(InvalidArgumentError, match="block_slots is second; it must be anchor or mask"):
        build_engines(BuildOptions(target, draft, tmp_path / "e", block_slots="second", dry_run=True))
