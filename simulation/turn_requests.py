"""Requests of conversation turns, as a simulated router sees them."""

from router.placement.candidate import ResourceDemand
from simulation.workload import ConversationTurn
from wire.frames import Message

_MOST_MESSAGE = 4


def build_demand(turn: ConversationTurn) -> ResourceDemand:
    """Return the facts of a request that a router knows: model, bytes of the prompt, and limit of output tokens."""
    return ResourceDemand(turn.model, turn.bytes, None, turn.max_tokens)


def build_messages(turn: ConversationTurn) -> tuple[Message, ...]:
    """Return the messages of a turn, earlier turns first, each padded to four characters for each of its tokens.

    Return no messages for a turn without shared texts.
    """
    return tuple(
        Message("user" if number % 2 == 0 else "assistant", text.ljust(tokens * _MOST_MESSAGE, "."))
        for number, (text, tokens) in enumerate(turn.conversation)
    )
