"""Draw the workload of a simulation, arrivals and lengths of requests, which is equal for every policy.

A conversation is drawn completely before its start. Only the times of its later turns depend on the answers, so that a
slow system receives fewer requests, as from real users.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import NormalDist

import msgspec

from simulation.mac.hardware import CHIPS, compute_prefill_speed
from simulation.scenario import Lengths, LoadSpec, Scenario, ScenarioError, round_to_tokens

BYTES_PER_TOKEN = 4.0
"""Median of the drawn bytes per prompt token."""
TOKEN_BYTES_SIGMA = 0.08
"""Sigma of the logarithm of the bytes per prompt token. The router estimates tokens from bytes."""
MAX_REQUESTS = 500_000
"""Maximum conversations of a scenario."""


@dataclass(slots=True, eq=False)
class ConversationTurn:
    """Request of a simulated conversation, with the true length of its answer."""

    id: str
    """Request id; empty until `rename`."""
    key: str
    """Name of the API key."""
    model: str
    prompt: int
    """Tokens of the complete prompt, including the earlier turns."""
    output: int
    """Tokens of the complete answer."""
    bytes: int
    """Size of the prompt's text in bytes."""
    max_tokens: int | None
    """Limit of the answer that the request states, in tokens; None without a limit."""
    think: float
    """Seconds from the previous answer to this request; without effect for the first turn."""
    session: str = ""
    """Name of the conversation, under which nodes cache its prompts; empty if they do not."""
    conversation: tuple[tuple[str, int], ...] = ()
    """Texts of the prompt in order, as pairs of a name and a number of tokens. Equal names mean equal texts.

    Empty for a prompt that shares no text with other prompts.
    """

    def rename(self, request_id: str) -> None:
        """Set the request id, once the order of all conversations is known."""
        self.id = request_id


@dataclass(slots=True, eq=False)
class SimulatedConversation:
    """Conversation of one client. Each turn after the first arrives `think` seconds after the previous answer."""

    at: float
    """Virtual time of the first turn, in seconds from the start of the simulation."""
    turns: list[ConversationTurn] = field(default_factory=list[ConversationTurn])


class _TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace."""

    at: float
    prompt: int
    output: int
    session: str = ""


def draw_conversations(scenario: Scenario, seed: int, folder: Path) -> list[SimulatedConversation]:
    """Draw all conversations of a scenario with a seed, and return them by start time.

    Traces are read from `folder`. Request ids number the conversations by start time: `r0`, or `r0.0`, `r0.1` for
    several turns. Raise `ScenarioError` if a trace cannot be read, or for more than `MAX_REQUESTS` conversations.
    """
    conversations: list[SimulatedConversation] = []
    for number, load in enumerate(scenario.load):
        random = Random(f"{seed} {number}")  # noqa: S311  the draws must be reproducible
        made = (
            _read_trace(scenario, load, folder, random) if load.trace else _draw_conversations(scenario, load, random)
        )
        for conversation in made:
            conversations.append(conversation)
            if len(conversations) > MAX_REQUESTS:
                raise ScenarioError(f"load {number + 1}: more than {MAX_REQUESTS} conversations")
    conversations.sort(key=lambda talk: talk.at)
    for number, conversation in enumerate(conversations):
        _rename_turns(conversation, f"r{number}")
    return conversations


def _rename_turns(conversation: SimulatedConversation, name: str) -> None:
    for number, turn in enumerate(conversation.turns):
        turn.rename(name if len(conversation.turns) == 1 else f"{name}.{number}")


def _draw_conversations(scenario: Scenario, load: LoadSpec, random: Random) -> Iterator[SimulatedConversation]:
    pace = load.rate or _compute_pace(scenario, load)
    at, end = load.begins, min(scenario.seconds, load.ends or scenario.seconds)
    number = 0
    while pace > 0:
        if number % load.bursts == 0:
            at += random.expovariate(pace / load.bursts)
        if at >= end:
            return
        yield _draw_conversation(scenario, load, random, at, number)
        number += 1


def _compute_pace(scenario: Scenario, load: LoadSpec) -> float:
    """Return the conversations per second that request `share` of the prefill speed of all nodes with the model."""
    billions = scenario.get_model(load.model).active
    speed = sum(
        compute_prefill_speed(CHIPS[node.chip], billions) * node.count
        for node in scenario.nodes
        if not node.models or load.model in node.models
    )
    return load.share * speed / (_compute_mean(load.prompt) * load.turns)


def _compute_mean(lengths: Lengths) -> float:
    """Return the mean of the drawn values from 999 quantiles, because the limits change the mean."""
    normal = NormalDist()
    drawn = (lengths.median * math.exp(lengths.sigma * normal.inv_cdf(part / 1000)) for part in range(1, 1000))
    return sum(min(lengths.most, max(lengths.least, request)) for request in drawn) / 999


def draw_length(lengths: Lengths, random: Random) -> float:
    """Draw a length in tokens or seconds from a distribution, limited to its `least` and `most`."""
    drawn = random.lognormvariate(math.log(lengths.median), lengths.sigma)
    return min(lengths.most, max(lengths.least, drawn))


def _draw_conversation(
    scenario: Scenario, load: LoadSpec, random: Random, at: float, number: int
) -> SimulatedConversation:
    context, conversation = scenario.get_model(load.model).context, SimulatedConversation(at)
    session = f"{load.key}-{load.model}-{number}" if load.turns > 1 else ""
    history: list[tuple[str, int]] = []
    while True:
        new, output = (
            round_to_tokens(draw_length(load.prompt, random)),
            round_to_tokens(draw_length(load.output, random)),
        )
        output = min(output, load.max_tokens or output, context // 4)
        context_left = context - (load.max_tokens or output) - 1 - sum(tokens for _, tokens in history)
        if new > context_left and conversation.turns:
            return conversation
        new = max(1, min(new, context_left))
        history.append((f"{session} {len(history)}", new))
        conversation.turns.append(_build_turn(load, history, output, draw_length(load.think, random), session, random))
        history.append((f"{session} {len(history)}", output))
        if random.random() >= 1 - 1 / load.turns:
            return conversation


def _build_turn(
    load: LoadSpec, history: list[tuple[str, int]], output: int, think: float, session: str, random: Random
) -> ConversationTurn:
    prompt = sum(tokens for _, tokens in history)
    size = max(1, int(prompt * BYTES_PER_TOKEN * random.lognormvariate(0.0, TOKEN_BYTES_SIGMA)))
    texts = tuple(history) if session else ()
    return ConversationTurn("", load.key, load.model, prompt, output, size, load.max_tokens, think, session, texts)


def _read_trace(scenario: Scenario, load: LoadSpec, folder: Path, random: Random) -> Iterator[SimulatedConversation]:
    context, path = scenario.get_model(load.model).context, folder / load.trace
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ScenarioError(f"trace {load.trace}: {error.strerror or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            one = msgspec.json.decode(line, type=_TraceLine)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ScenarioError(f"trace {load.trace}, line {number} of {len(lines)}: {error}") from None
        at = load.begins + one.at
        if at >= scenario.seconds:
            continue
        output = max(1, min(one.output, load.max_tokens or one.output, context // 4))
        prompt = max(1, min(one.prompt, context - (load.max_tokens or output) - 1))
        yield SimulatedConversation(at, [_build_turn(load, [(one.session, prompt)], output, 0.0, one.session, random)])
