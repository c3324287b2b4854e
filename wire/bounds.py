"""Bounds of every number, text and list in a frame.

The decoder (`wire.codec.decode`) refuses a frame with a value outside its bounds before any value is used. Sums of
sizes therefore fit 64 bits, the database can store every number, and lists have a known maximum length. Honest peers
stay far below the bounds; `router.placement.sanitize_report` checks plausibility.
"""

from typing import Annotated

from msgspec import Meta

MAX_SIZE_BYTES = 2**50
"""Maximum of a `Size` in bytes: 1 PiB, above the memory and the file sizes of every machine."""
MAX_TOKENS = 2**31 - 1
"""Maximum token id and number of tokens."""
MAX_COUNT = 2**53
"""Largest integer that every JSON parser keeps exact; bounds counters and sequence numbers."""
MAX_NUMBER = 2**63 - 1
"""Maximum of a `Number`, and of the absolute value of a `Signed`: the largest integer that the database can store."""
MAX_SECONDS = 2.0**40
"""Maximum of a duration or a Unix time, in seconds."""
MAX_REAL = 2.0**60
"""Maximum absolute value of any other real number."""
MAX_WORD_CHARACTERS = 1024
"""Maximum characters of a name, id or code."""
MAX_TEXT_CHARACTERS = 8 * 1024
"""Maximum characters of one or two sentences, a path, a URL or a stop string."""
MAX_MESSAGE_CHARACTERS = 64 * 1024
"""Maximum characters of an error text."""
MAX_LONG_CHARACTERS = 2**24
"""Maximum characters of one long text in a frame, such as the content of a message, tools, a grammar or an answer."""
MAX_BLOB_BYTES = 64 * 1024
"""Maximum bytes of a `Blob`."""
MAX_ITEMS = 1024
"""Maximum items of a list without a limit of its own."""
MAX_MODELS = 512
"""Maximum models, and maximum video packages, in one report of a node."""
MAX_GROUPS = 256
"""Maximum decode batches of a model."""
MAX_DELTAS = 256
"""Maximum deltas of a frame, pieces of a delta, and log probabilities of a delta."""
MAX_CALL_BYTES = 1024 * 1024
"""Maximum bytes of a tool call of an answer, as UTF-8."""
LONG_CHARACTERS = 64 * 1024
"""Characters of text in one engine step above which each delta is sent in its own frame."""
MAX_BIASES = 16 * 1024
"""Maximum logit biases of a request."""
MAX_MESSAGES = 2**18
"""Maximum messages of a conversation and tool calls of a message, and maximum models in frames of the engine."""
MAX_IDS = 2**24
"""Maximum token ids of a prompt, or of an answer."""

Size = Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)]
"""Number of bytes, at most `MAX_SIZE_BYTES`."""
Difference = Annotated[int, Meta(ge=-4 * MAX_SIZE_BYTES, le=4 * MAX_SIZE_BYTES)]
"""Bytes: a sum or difference of sizes, such as a headroom, which is negative above a limit."""
Estimate = Annotated[int, Meta(ge=-(2**62), le=2**62)]
"""Bytes computed from a request or from a model's files; can exceed the memory of every machine."""
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""Number of tokens, or a token id."""
Ids = Annotated[tuple[Tokens, ...], Meta(max_length=MAX_IDS)]
"""Token ids, at most `MAX_IDS`."""
Natural = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""Count, or another number that is not negative."""
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
"""Number of a request, sequence number of a command, nonce, or epoch."""
Signed = Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Number that may be negative, such as a seed."""
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
"""Duration in seconds, or a Unix time."""
Real = Annotated[float, Meta(ge=-MAX_REAL, le=MAX_REAL)]
"""Real number of at most `MAX_REAL` in absolute value; neither NaN nor infinite."""
Word = Annotated[str, Meta(max_length=MAX_WORD_CHARACTERS)]
"""Name, id or code of at most `MAX_WORD_CHARACTERS`."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
"""One or two sentences, a path, a URL or a stop string, of at most `MAX_TEXT_CHARACTERS`."""
ErrorText = Annotated[str, Meta(max_length=MAX_MESSAGE_CHARACTERS)]
"""Error text for a person, of at most `MAX_MESSAGE_CHARACTERS`."""
Long = Annotated[str, Meta(max_length=MAX_LONG_CHARACTERS)]
"""Long text of a request or an answer: content, tools, arguments, a grammar, or a text to embed."""
Blob = Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]
"""Certificate, digest, nonce, token of a vocabulary, JSON object, or part of a fetched file."""
