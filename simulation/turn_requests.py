"""Convert turns of conversations to requests for a simulated router."""

from router.placement.candidate import ResourceDemand
from simulation.workload import ConversationTurn
from wire.frames import Message

_MOST_MESSAGE = 4


def build_demand(turn: ConversationTurn) -> ResourceDemand:
    """Return the demand of a request as a router knows it: model, bytes of the prompt, and limit of output tokens."""
    return ResourceDemand(turn.model, turn.bytes, None, turn.max_tokens)


def build_messages(turn: ConversationTurn) -> tuple[Message, ...]:
    """Return the messages of a turn and of the earlier turns in order, each padded to four characters per token.

    Return no messages for a turn whose prompt shares no text with other turns.
    """
    return tuple(
        Message("user" if number % 2 == 0 else "assistant", text.ljust(tokens * _MOST_MESSAGE, "."))
        for number, (text, tokens) in enumerate(turn.conversation)
    )
