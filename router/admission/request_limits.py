"""The most that one body may ask for, whichever reader takes it."""

MAX_VALUES = 64 * 1024
"""Values of one body, counted by its commas and brackets: 16,384 messages of two fields fit. It bounds the memory of a
parsed body to 16 MiB and the time in its thread to 100 ms: the costliest value, a part of a message, takes 250 bytes
for each comma."""
MAX_TEXTS = 2 * MAX_VALUES
"""Texts of one body: a key and a value for each comma."""
MAX_PROMPT_IDS = 512 * 1024
"""The same for a body whose prompt may be token ids, of which each takes 36 bytes."""
MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Memory of a body as Python text: one character beyond U+FFFF in 8 MiB of ASCII makes each character take 4 bytes, and
the text stands twice while it is parsed."""
MAX_KEYS = 2048
"""Keys of one object. The validator collects an error for each wrong key, and 2,048 errors take 10 ms."""
MOST_TOKENS = 10_000_000
MOST_CHOICES = 16
MOST_IGNORED = 32
"""Names of ignored fields in the header of an answer; a body with more unknown fields of its own is refused."""
MOST_STOPS = 16
MOST_PARTS = 4096
"""Blocks of one message."""
MOST_PROMPTS = 64
"""Prompts of one completion: each is a request of its own to the cluster."""
MOST_TOKEN_ID = 2**31 - 1
LONGEST_STOP = 512
MOST_MESSAGES = 16_384
LONGEST_NAME = 256
TEMPLATE_BYTES = 16
"""What the chat template adds to each message and to each call, in bytes of text."""
PLAIN_ROLES = ("system", "developer", "user", "assistant")
"""Roles whose messages need nothing but text."""
MOST_TOP_K = 2**31 - 1
MOST_BIASES = 1024
MOST_TOP_LOGPROBS = 20
MOST_TOOLS = 128
MOST_CALLS = 128
"""Tool calls in one message of the conversation."""
GRAMMAR_BYTES = 128 * 1024
"""Of a schema or a grammar that an answer has to follow."""
MOST_SCHEMA_CHOICES = 1024
TOOLS_BYTES = 256 * 1024
VARIABLES_BYTES = 16 * 1024
DEEPEST = 64
"""Levels of objects and lists in what goes on to the engine as JSON: its reader must not run out of stack."""
