"""Executors over toy engines with everything drawn that must not matter, and what the target alone would say."""

import numpy as np
from hypothesis import strategies as st

from faser_trtllm.core.sampling_params import SamplingParams
from tests.support.executor_harness import Setup, run
from tests.support.toy_engine import context_row

VOCAB = 5
POLICIES = ["fixed:1", "fixed:3", "fixed:4", "fixed:4:draft_ahead", "fixed:3:ping_pong", "erratic", "erratic"]
POLICIES += ["schedule", "gp_lcb", "price", "price:mode=draft_ahead", "price:mode=ping_pong,prune=on", "price:prune=on"]
DRAFTERS = [
    "model",
    "suffix",
    "suffix,model",
    "foreign",
    "head",
    "suffix,head",
    "medusa",
    "suffix,medusa",
    "block",
    "suffix,block",
]
CUTS = {"timeout": "timeout", "cancel": "cancelled"}


def greedy_reference(table, prompt, max_tokens, end_ids=()):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = int(np.argmax(table[context_row(tokens, len(tokens) - 1, table.shape[1])]))
        if token in end_ids:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@st.composite
def setups(draw):
    """Batch sizes, policies, chunk sizes, block sizes, tight caches, experts: everything that must not matter."""
    max_batch_size = draw(st.sampled_from([1, 2, 3, 8]))
    capacity = draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]))
    tokens_per_block = draw(st.sampled_from([2, 4, 16]))
    drafters = draw(st.sampled_from(DRAFTERS))
    blocks_for_one = -(-64 // tokens_per_block)
    fewest_logits = max_batch_size * 5  # a GPU engine's: a token and four drafts of each
    return Setup(
        vocab_size=VOCAB,
        table_seed=draw(st.integers(0, 3)),
        noise=draw(st.sampled_from([0.0, 0.7, 3.0])),
        policy=draw(st.sampled_from(POLICIES)),
        max_batch_size=max_batch_size,
        max_num_tokens=draw(st.sampled_from([8, 11, 64])),
        max_logit_rows=draw(st.sampled_from([None, fewest_logits])),
        tokens_per_block=tokens_per_block,
        num_blocks=blocks_for_one * draw(st.sampled_from([1, 2, 8])),
        capacity=capacity,
        reuse=draw(st.booleans()),
        chunk_unit_size=draw(st.sampled_from([1, 2, 4])),
        policy_seed=draw(st.integers(0, 1000)),
        drafters=drafters,
        num_branches=0 if drafters == "suffix" else draw(st.sampled_from([0, 1, 3])),
        draft_window=draw(st.sampled_from([None, 7, 20])) if "model" in drafters else None,
        is_mixture=draw(st.booleans()),
    )


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def check_early_ends(setup, data):
    """Requests cut by a deadline or a cancellation at any step have a beginning of their text; the others have all."""
    requests, arrivals, cuts = [], [], []
    for _ in range(data.draw(st.integers(2, 8))):
        seeded = {"temperature": 0.8, "seed": data.draw(st.integers(0, 9)), "repetition_penalty": 1.3}
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 30)), **data.draw(st.sampled_from([{}, seeded])))
        requests.append((data.draw(prompts), params))
        arrivals.append(data.draw(st.integers(0, 6)))
        cut = st.tuples(st.sampled_from(sorted(CUTS)), st.integers(0, 12))
        cuts.append(data.draw(st.one_of(st.none(), cut)))
    result = run(setup, requests, arrivals, cuts)
    plain = Setup(vocab_size=VOCAB, table_seed=setup.table_seed, max_batch_size=1)
    for index, (request, cut) in enumerate(zip(requests, cuts, strict=True)):
        expected, tokens = run(plain, [request]).tokens["0"], result.tokens[str(index)]
        reason = result.reasons[str(index)]
        assert reason == "length" or (cut is not None and reason == CUTS[cut[0]])
        assert tokens == (expected if reason == "length" else expected[: len(tokens)])
