"""The inputs that TensorRT-LLM's public client scripts send, and the ways in which they read the answers."""

import queue
from functools import partial

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

STOP = {
    "input_ids": np.empty([1, 1], np.int32),
    "input_lengths": np.zeros([1, 1], np.int32),
    "request_output_len": np.array([[0]], np.int32),
    "stop": np.array([[True]], bool),
}


def inputs_of(tensors, module=grpcclient):
    inputs = []
    for name, array in tensors.items():
        inputs.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def send(server, model, tensors, outputs=None, request_id="", while_open=None, **more):
    """Results and errors of one request on a stream that is then closed, as the client scripts do it."""
    received = queue.Queue()
    wanted = None if outputs is None else [grpcclient.InferRequestedOutput(name) for name in outputs]
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=partial(lambda received, result, error: received.put(error or result), received))
        client.async_stream_infer(model, inputs_of(tensors), outputs=wanted, request_id=request_id, **more)
        if while_open is not None:
            while_open(client)
        client.stop_stream()
    return list(received.queue)


def succeed(results):
    for result in results:
        assert not isinstance(result, InferenceServerException), result
    return results


def end_to_end_inputs(prompt, output_len=20, streaming=False, **more):
    """Return the inputs that end_to_end_grpc_client.py sends for one prompt."""
    inputs = {
        "text_input": np.array([[prompt]]).astype(object),
        "max_tokens": np.array([[output_len]], np.int32),
        "stream": np.array([[streaming]], bool),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
        "exclude_input_in_output": np.array([[False]], bool),
        "end_id": np.array([[-1]], np.int32),
    }
    return inputs | more


def stacked(items):
    return {name: np.concatenate([item[name] for item in items]) for name in items[0]}


def llm_client_inputs(token_ids, output_len=16, streaming=False, **more):
    """Return the inputs that inflight_batcher_llm_client.py sends."""
    inputs = {
        "input_ids": np.array([token_ids], np.int32),
        "input_lengths": np.array([[len(token_ids)]], np.int32),
        "request_output_len": np.array([[output_len]], np.int32),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
        "streaming": np.array([[streaming]], bool),
        "end_id": np.array([[-1]], np.int32),
        "pad_id": np.array([[50256]], np.int32),
        "runtime_top_k": np.array([[1]], np.int32),
        "runtime_top_p": np.array([[0.0]], np.float32),
    }
    return inputs | more


def tokens_of(result):
    output_ids = result.as_numpy("output_ids")
    assert output_ids.dtype == np.int32
    assert result.as_numpy("sequence_length").tolist() == [[output_ids.shape[2]]]
    return output_ids[0][0].tolist()
