"""The bounds of every number, text and list that crosses the wire.

`wire.codec.decode` refuses a frame with a value outside of its bounds before any value of that frame is used. Sums of
sizes therefore stay integers of 64 bits, the database can store every number, and no list is longer than its reader
expects. The bounds are far from what an honest peer sends; `router.view` decides what is plausible.
"""

from typing import Annotated

from msgspec import Meta

MAX_SIZE_BYTES = 2**50
"""1 PiB: no machine has as much memory, and no file is as long."""
MAX_TOKENS = 2**31 - 1
MAX_COUNT = 2**53
"""Counters and sequence numbers: the integers that JSON readers keep exact."""
MAX_NUMBER = 2**63 - 1
MAX_SECONDS = 2.0**40
MAX_REAL = 2.0**60
MAX_WORD_CHARACTERS = 1024
MAX_TEXT_CHARACTERS = 8 * 1024
MAX_MESSAGE_CHARACTERS = 64 * 1024
MAX_LONG_CHARACTERS = 2**24
MAX_BLOB_BYTES = 64 * 1024
MAX_ITEMS = 1024
MAX_MODELS = 512
"""Models in one report."""
MAX_GROUPS = 256
MAX_DELTAS = 256
"""Deltas in one frame; pieces, and log probabilities, of one delta."""
LONG_CHARACTERS = 64 * 1024
"""Characters of text in one step of an engine, above which each delta has a frame of its own."""
MAX_BIASES = 16 * 1024
MAX_MESSAGES = 2**18
MAX_IDS = 2**24

Size = Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)]
"""Bytes."""
Difference = Annotated[int, Meta(ge=-4 * MAX_SIZE_BYTES, le=4 * MAX_SIZE_BYTES)]
"""Bytes: a sum or a difference of sizes, negative when over."""
Estimate = Annotated[int, Meta(ge=-(2**62), le=2**62)]
"""Bytes that were computed, from what a client asked for or from a model's files: more than any machine may have."""
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Ids = Annotated[tuple[Tokens, ...], Meta(max_length=MAX_IDS)]
"""Token ids."""
Natural = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
"""Names a request, a question or an order."""
Signed = Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Real = Annotated[float, Meta(ge=-MAX_REAL, le=MAX_REAL)]
"""Finite, neither NaN nor infinite."""
Word = Annotated[str, Meta(max_length=MAX_WORD_CHARACTERS)]
"""A name, an id, a code."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
"""A sentence or two."""
ErrorText = Annotated[str, Meta(max_length=MAX_MESSAGE_CHARACTERS)]
"""What went wrong, with the next step."""
Long = Annotated[str, Meta(max_length=MAX_LONG_CHARACTERS)]
"""What a client wrote, or a model."""
Blob = Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]
"""Certificates, digests, nonces, JSON objects."""
