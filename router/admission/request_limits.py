"""Limits of one request body, which are equal in all dialects."""

MAX_VALUES = 64 * 1024
"""Maximum values of one body, counted by its commas and brackets. 16,384 messages of two fields are within the limit.

This bounds the memory of a parsed body to 16 MiB, and its time in the worker thread to 100 ms. The most expensive
value, a part of a message, takes 250 bytes for each comma.
"""
MAX_TEXTS = 2 * MAX_VALUES
"""Maximum strings of one body: a key and a value for each comma."""
MAX_PROMPT_IDS = 512 * 1024
"""Maximum values of a body whose prompt may be token ids. Each token id takes 36 bytes."""
MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Maximum memory of a body as Python text.

One character beyond U+FFFF in 8 MiB of ASCII makes every character take 4 bytes, and the text exists twice during
parsing.
"""
MAX_KEYS = 2048
"""Maximum keys of one object. The validator collects an error for each wrong key, and 2,048 errors take 10 ms."""
MAX_TOKENS = 10_000_000
"""Maximum number of tokens in a field of a body, such as `max_tokens`, and maximum token ids of one prompt."""
MAX_CHOICES = 16
MAX_IGNORED = 32
"""Maximum ignored fields named in the header of an answer. A body with more unknown fields at its top is refused."""
MAX_STOPS = 16
MAX_PARTS = 4096
"""Maximum content parts of one message."""
MAX_PROMPTS = 64
"""Maximum prompts of one completion. Each prompt is a separate request to the cluster."""
MAX_INPUTS = 2048
"""Maximum texts of one request for embeddings or scores: OpenAI's limit."""
MAX_QUERY_CHARS = 16 * 1024
"""Maximum characters of a query for scores, which is tokenized with each of the documents."""
MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_CHARS = 512
MAX_MESSAGES = 16_384
MAX_NAME_CHARS = 256
TEMPLATE_BYTES = 16
"""Assumed bytes of text that the chat template adds to each message and to each call."""
PLAIN_ROLES = ("system", "developer", "user", "assistant")
"""Roles whose messages have no required field besides their text."""
MAX_TOP_K = 2**31 - 1
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 512
"""Maximum tools of one body. Claude Code sends all tools of all its MCP servers, even those that it loads later."""
MAX_CALLS = 128
"""Maximum tool calls in one message of the conversation."""
MAX_GRAMMAR_BYTES = 128 * 1024
"""Maximum bytes of a schema or a grammar for an answer."""
MAX_SCHEMA_CHOICES = 1024
MAX_TOOLS_BYTES = 256 * 1024
"""Maximum bytes of the tools of a body as JSON.

Except in Anthropic's bodies, the limit also applies to arguments of a call that are an object, and to a foreign item.
"""
MAX_VARIABLES_BYTES = 16 * 1024
"""Maximum bytes of the variables of a chat template as JSON."""
MAX_JSON_DEPTH = 64
"""Maximum nesting of objects and lists in JSON for the engine, whose parser must not run out of stack."""
TEMPLATE_VARIABLES = frozenset(
    {
        "add_vision_id",
        "builtin_tools",
        "clear_thinking",
        "custom_instructions",
        "date_string",
        "documents",
        "enable_cot",
        "enable_thinking",
        "force_reasoning",
        "interleaved_thinking",
        "keep_all_reasoning",
        "keep_past_thinking",
        "language",
        "model_identity",
        "persona",
        "preserve_thinking",
        "python_tools",
        "reasoning",
        "reasoning_effort",
        "reasoning_strategy",
        "role",
        "system_message",
        "system_prompt",
        "task",
        "think",
        "thinking",
        "thinking_budget",
        "thinking_mode",
        "tools_in_user_message",
        "xml_tools",
    }
)
"""Variables of a chat template that a request may set, from the templates of known models."""
