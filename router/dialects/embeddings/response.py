"""Answers with embeddings, in the API formats of OpenAI and Ollama.

Each vector is encoded by a separate call, because the answer is built in the worker thread, whose calls must be short.
A number in single precision is written as the same number in double precision, so that no digit is lost.
"""

import binascii
import struct

import msgspec

from router.dispatch.request import CompleteAnswer, RequestSpec
from wire.frames import NUMBER_BYTES, Finished

_encode = msgspec.json.Encoder().encode


def encode_embeddings(spec: RequestSpec, answer: CompleteAnswer, finished: Finished, *, as_base64: bool) -> bytes:
    """Encode the answer of `/v1/embeddings`, with vectors as lists of numbers or, if `as_base64`, as base64."""
    encode_vector = _encode_base64 if as_base64 else encode_numbers
    rows = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (place, encode_vector(vector))
        for place, vector in enumerate(answer.vectors)
    )
    tokens = finished.prompt_tokens
    return b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
        b",".join(rows),
        _encode(spec.demand.model),
        tokens,
        tokens,
    )


def encode_ollama_embed(spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
    """Encode the answer of `/api/embed`.

    `total_duration` is the queued time and the prefill time on the node, in nanoseconds. `load_duration` is always 0.
    """
    timings = finished.timings
    return b'{"model":%b,"embeddings":[%b],"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}' % (
        _encode(spec.demand.model),
        b",".join(map(encode_numbers, answer.vectors)),
        round((timings.waiting + timings.prefill) * 1e9),
        finished.prompt_tokens,
    )


def encode_ollama_load(spec: RequestSpec) -> bytes:
    """Encode the answer of `/api/embed` to a request that has loaded its model."""
    return b'{"model":%b,"embeddings":[]}' % _encode(spec.demand.model)


def encode_ollama_embedding(spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
    """Encode the answer of `/api/embeddings`, which has one vector."""
    return b'{"embedding":%b}' % encode_numbers(answer.vectors[0])


def encode_numbers(vector: bytes) -> bytes:
    """Encode a vector as a JSON list of numbers. `vector` has numbers in single precision and little endian."""
    return _encode(struct.unpack(f"<{len(vector) // NUMBER_BYTES}f", vector))


def _encode_base64(vector: bytes) -> bytes:
    return b'"%b"' % binascii.b2a_base64(vector, newline=False)
