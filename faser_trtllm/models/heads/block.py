"""A block drafter's checkpoint: DFlash, DFlash2 or DSpark, in the layouts that are published.

Its layers see hidden rows of the target as context, and one pass gives the laws of a whole block of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """model: of the drafter's layers; its vocab_size is the target's, its sliding_window 0. model.tie_word_embeddings:
    it has neither an embedding nor an LM head of its own, and its target's are one matrix.

    layers: those of the target whose entering hidden rows are the features, ascending; the target's num_layers: what
    leaves the last. block_size: rows of a block: the last committed token, then masks. first_slot: the first row with a
    draft; 0: a row's output is the token after its position, 1: at its position. windows: by layer, tokens that a row
    sees, itself included; 0: all. causal: by layer, whether a row of the block sees those after it not.

    markov_rank: of the matrices that add logits by the draft before (DSpark); selector_rank, selector_top_k: of the
    candidates that are scored with the draft before (DFlash2); conv_taps, conv_group_size: of the convolutions over the
    block's rows next to each sublayer (DFlash2). 0: none. logit_softcap: 0: none.
    """

    model: ModelConfig
    target_hidden_size: int
    layers: tuple[int, ...]
    block_size: int
    first_slot: int
    mask_token_id: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    markov_rank: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_taps: int = 0
    conv_group_size: int = 0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0

    @property
    def num_features(self) -> int:
        """Values of the target's hidden rows that one context row is made of."""
        return len(self.layers) * self.target_hidden_size

    @property
    def num_places(self) -> int:
        """Drafts of a block."""
        return self.block_size - self.first_slot
