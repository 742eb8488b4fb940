"""A peer: llama.cpp through llama-cpp-python's low-level batch interface."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.workers.protocol import CONTEXT_LEN, Counts, Laps, TokenIds, serve, step_mix, time_steps


class LlamaCpp:
    """Plain greedy decoding ("generate"), one context per batch size, one sequence per prompt."""

    def load(self, request: dict[str, Any]) -> dict[str, str]:
        import llama_cpp

        self._api = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        self._num_threads = request["num_threads"]
        self._max_seq_len = request["max_seq_len"]
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = request["use_extra_bufts"]
        path = request["gguf"]
        if "quantize" in request:
            path = _quantize(llama_cpp, path, request["quantize"], self._num_threads)
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the GGUF file")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._contexts: dict[int, Any] = {}
        self._max_rows = request["max_rows"]
        self._batch = _Batch(llama_cpp, self._max_rows)
        return {"llama-cpp-python": llama_cpp.__version__}

    def generate(self, setting: str, prompts: Sequence[list[int]], max_tokens: int, counts: Counts) -> TokenIds:
        context = self._context(len(prompts))
        self._api.llama_memory_clear(self._api.llama_get_memory(context), False)
        num_prompts, prompt_len = len(prompts), len(prompts[0])
        sequences = np.arange(num_prompts)
        output = np.empty((max_tokens, num_prompts), np.int32)
        batch = self._batch
        last = np.arange(1, num_prompts + 1) * prompt_len - 1
        batch.fill(
            np.concatenate(prompts),
            np.tile(np.arange(prompt_len), num_prompts),
            np.repeat(sequences, prompt_len),
            last,
        )
        laps = Laps(counts)
        for step in range(max_tokens):
            batch.decode(context)
            output[step] = self._logits(context, num_prompts).argmax(axis=1)
            laps.end_step() if step else laps.end_prefill()
            batch.fill(output[step], prompt_len + step, sequences, sequences)
        counts.num_target_passes += max_tokens * num_prompts
        token_ids: TokenIds = output.T.tolist()
        return token_ids

    def steps(self, num_rows: Sequence[int], num_repeats: int) -> dict[int, float]:
        return {rows: self._time_step(step_mix(rows), num_repeats) for rows in num_rows}

    def _time_step(self, mix: list[int], num_repeats: int) -> float:
        context = self._context(len(mix))
        memory = self._api.llama_get_memory(context)
        self._api.llama_memory_clear(memory, False)
        batch = self._batch
        for sequence in range(len(mix)):
            tokens = 1 + np.arange(CONTEXT_LEN) % 500
            batch.fill(tokens, np.arange(CONTEXT_LEN), np.full(CONTEXT_LEN, sequence), [])
            batch.decode(context)
        positions = np.concatenate([CONTEXT_LEN + np.arange(rows) for rows in mix])
        sequences = np.repeat(np.arange(len(mix)), mix)

        def step() -> None:
            batch.fill(1 + positions, positions, sequences, np.arange(positions.size))
            batch.decode(context)
            self._logits(context, positions.size)
            for sequence in range(len(mix)):
                self._api.llama_memory_seq_rm(memory, sequence, CONTEXT_LEN, -1)

        return time_steps(step, num_repeats)

    def _context(self, num_sequences: int) -> Any:
        if num_sequences not in self._contexts:
            params = self._api.llama_context_default_params()
            params.n_ctx = num_sequences * self._max_seq_len
            params.n_batch = params.n_ubatch = self._max_rows
            params.n_seq_max = num_sequences
            params.n_threads = params.n_threads_batch = self._num_threads
            context = self._api.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp cannot open a context of {num_sequences} sequences")
            self._contexts[num_sequences] = context
        return self._contexts[num_sequences]

    def _logits(self, context: Any, num_rows: int) -> Any:
        pointer = self._api.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self._vocab_size))


def _quantize(api: Any, path: str, kind: str, num_threads: int) -> str:
    """Write llama.cpp's own 4-bit file next to a bf16 one: all in q4_0, or its recipe q4_k_m."""
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.pure = kind == "q4_0"
    params.nthread = num_threads
    target = path.replace("bf16", kind)
    if os.path.exists(target):
        return target
    status = api.llama_model_quantize(path.encode(), target.encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    return target


class _Batch:
    """A llama_batch as arrays, which are filled without a Python loop per row."""

    def __init__(self, api: Any, max_rows: int) -> None:
        self._api = api
        self._batch = api.llama_batch_init(max_rows, 0, 1)

        def view(pointer: Any) -> Any:
            return np.ctypeslib.as_array(pointer, shape=(max_rows,))

        self._tokens, self._positions = view(self._batch.token), view(self._batch.pos)
        self._logits = view(self._batch.logits)
        view(self._batch.n_seq_id)[:] = 1
        address = ctypes.addressof(self._batch.seq_id.contents)
        pointers = np.ctypeslib.as_array((ctypes.c_uint64 * max_rows).from_address(address))
        self._sequences = np.zeros(max_rows, np.int32)
        pointers[:] = self._sequences.ctypes.data + 4 * np.arange(max_rows, dtype=np.uint64)

    def fill(self, tokens: Any, positions: Any, sequences: Any, logit_rows: Any) -> None:
        count = self._batch.n_tokens = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = sequences
        self._logits[:count] = 0
        self._logits[logit_rows] = 1

    def decode(self, context: Any) -> None:
        status = self._api.llama_decode(context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")


if __name__ == "__main__":
    try:
        serve(LlamaCpp())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)
