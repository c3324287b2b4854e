"""The most that one body may ask for, whichever reader takes it."""

MOST_TOKENS = 10_000_000
MOST_CHOICES = 16
MOST_STOPS = 16
LONGEST_STOP = 512
MOST_MESSAGES = 16_384
LONGEST_NAME = 256
TEMPLATE_BYTES = 16
"""What the chat template adds to each message, in bytes of text."""
ROLES = ("system", "developer", "user", "assistant", "tool")
