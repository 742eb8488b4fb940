"""Frames between Triton's backend and the engine process."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.wire import BYTES, Body, InputTensor, WireError
from tests.support.backend_frames import DTYPES, Refusal, content_of, read_responses, request_body, texts_array

texts = st.text(max_size=20)
arrays = st.one_of(
    st.builds(
        lambda kind, rows, columns: (np.arange(rows * columns) % 2).astype(kind).reshape(rows, columns),
        st.sampled_from(sorted(DTYPES, key=str)),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.lists(st.binary(max_size=9), max_size=4).map(lambda items: texts_array([items])),
)


requests = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    texts,
    st.lists(st.sampled_from(["text_output", "output_ids", "finish_reason"]), unique=True),
    st.lists(st.tuples(texts, arrays), max_size=3),
)


@given(requests)
def test_a_request_arrives_as_it_was_sent(fields):
    model, handle, request_id, outputs, inputs = fields
    frame = wire.read_request(Body(memoryview(request_body(*fields))))
    assert (frame.model, frame.handle) == (model, handle)
    assert (frame.request_id, frame.outputs.decode().split()) == (request_id, outputs)
    assert [tensor.name for tensor in frame.inputs] == [name for name, _ in inputs]
    for tensor, (_, array) in zip(frame.inputs, inputs, strict=True):
        found = tensor.as_numpy()
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert (found == array).all()


@given(requests, st.data())
def test_a_frame_that_was_cut_is_refused(fields, data):
    body = request_body(*fields)
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    with pytest.raises(WireError):
        wire.read_request(Body(memoryview(cut)))


@given(
    st.sampled_from([*DTYPES.values(), BYTES, 14, 0]),
    st.lists(st.integers(-1, 4), max_size=3).map(tuple),
    st.binary(max_size=24),
)
def test_bytes_that_do_not_fit_are_the_client_s_error(number, shape, content):
    tensor = InputTensor("seed", number, shape, memoryview(content))
    with contextlib.suppress(InvalidArgumentError):
        assert tensor.as_numpy().ndim == len(shape)


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xffhello", b"\x05\0\0", b"\x02\0\0\0a"])
def test_texts_that_are_longer_than_their_bytes(content):
    with pytest.raises(InvalidArgumentError, match=f"text_input has {len(content)} bytes that do not fit its shape"):
        InputTensor("text_input", BYTES, (1, 1), memoryview(content)).as_numpy()


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.booleans(), st.lists(arrays, max_size=3)), max_size=5), texts)
def test_responses_say_what_was_put_in(items, message):
    body, expected = b"", []
    for handle, is_final, outputs in items:
        tensors = [wire.output_tensor(f"o{place}", array) for place, array in enumerate(outputs)]
        body += wire.response(handle, tensors, is_final)
        named = {f"o{place}": (*content_of(array), array.shape) for place, array in enumerate(outputs)}
        expected.append((handle, is_final, {n: (number, s, c) for n, (number, c, s) in named.items()}, None))
    about_field = InvalidArgumentError("is -1, allowed is 0", field="top_k", value=-1, limit=0)
    body += wire.error_response(7, UnavailableError(message), {}) + wire.final_flag(8)
    body += wire.error_response(9, about_field, {"top_k": "runtime_top_k"})
    expected += [(7, True, {}, Refusal(4, message)), (8, True, {}, None)]
    sentence = "runtime_top_k is -1, allowed is 0"
    expected += [(9, True, {}, Refusal(3, sentence, "runtime_top_k", "-1", "0"))]
    assert read_responses(body) == expected


def test_sets_of_outputs_are_not_kept_for_ever():
    """A client could ask for millions of them."""
    for number in range(2000):
        names = {"text_output", f"output_{number}"}
        assert wire.output_names("".join(f"{name}\n" for name in names).encode()) == names
    assert wire.output_names.cache_info().currsize < 1000
