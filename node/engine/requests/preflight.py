"""Preflight checks of a request, before any commitment: is it possible at all, and is it possible now?

A request is refused as too large only after an exact count of its tokens, so that the message has all numbers.
"""

from dataclasses import dataclass

from node.engine.memory.gate import GateSite, MemoryGate
from wire.capacity import arithmetic
from wire.frames import Generate
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import Memory, Model
from wire.units import show_size


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Size of a request in tokens and choices, which determines its memory."""

    prompt: int
    """Prompt tokens."""
    limit: int
    """Maximum tokens of one answer."""
    answer_tokens: int
    """Expected tokens of one answer, which are committed at admission. The commitment grows later if necessary."""
    choices: int
    """Number of choices. Choices of a resumed request that have already ended count until `replace_choices`."""

    @property
    def length(self) -> int:
        """Committed tokens of a row: prompt and expected answer."""
        return self.prompt + self.answer_tokens

    def replace_choices(self, choices: int) -> "RequestShape":
        """Return this shape with another number of choices, because choices of a resumed request may have ended."""
        return RequestShape(self.prompt, self.limit, self.answer_tokens, choices)


def compute_shape(request: Generate, prompt: int, default_limit: int, context: int) -> RequestShape:
    """Return the size of a request with `prompt` prompt tokens. `default_limit` is the maximum length of an answer
    without max_tokens, `context` the context of the model, both in tokens. `request.context_limit` may lower the
    context.

    An answer ends at the end of the context, even if max_tokens is higher. The limit of a resumed answer counts from
    its start, as for a new answer. If the resumed answer is already longer, because another node had another default or
    context, it ends with its next token.
    """
    max_tokens = request.params.max_tokens
    context = min(context, request.context_limit or context)
    known = max(map(len, request.resume), default=0)
    limit = min(default_limit if max_tokens is None else max_tokens, max(1, context - prompt))
    if known > limit and (max_tokens is None or known < max_tokens):
        limit = known + 1
    return RequestShape(prompt, limit, max(1, min(limit, max(request.expected, known + 1))), request.params.n)


def refuse_impossible(request: Generate, shape: RequestShape, model: Model, batch: int) -> Refused | None:
    """Return the refusal of a request that this node can never serve, however much memory is free; otherwise None.

    Check the model, structured output, and the limits of choices and context. `batch` is the maximum number of rows
    that decode together.
    """
    if request.model != model.name:
        return Refused(RefusalCode.NO_MODEL, f"this node serves {model.name}, not {request.model}")
    if request.params.grammar is not None and "grammar" not in model.features:
        return Refused(RefusalCode.UNSUPPORTED, f"{model.name} does not support structured output on this node")
    if shape.choices < 1 or shape.limit < 1:
        return Refused(RefusalCode.INVALID, "n and max_tokens must be at least 1")
    if shape.choices > batch:
        return Refused(RefusalCode.UNSUPPORTED, f"n is {shape.choices}, the limit of this node is {batch}: lower n")
    if shape.prompt + shape.limit > model.context:
        return Refused(
            RefusalCode.CONTEXT,
            (
                f"the prompt has {shape.prompt} tokens; the context of {model.name} is {model.context} with the "
                "answer: shorten the prompt"
            ),
        )
    return None


def refuse_too_large(shape: RequestShape, memory: Memory, model: Model) -> Refused | None:
    """Return the refusal, with all numbers, of a request that would not fit even on this node when idle; None if it
    would fit."""
    if arithmetic.can_ever_fit(memory, model, shape.prompt, shape.answer_tokens, shape.choices):
        return None
    needed = arithmetic.estimate_alone_bytes(model, shape.prompt, shape.answer_tokens, shape.choices)
    holds = max(0, arithmetic.compute_most_bytes(memory))
    numbers = MemoryNumbers(
        needed + memory.margin,
        memory.cap,
        memory.current,
        memory.reserved,
        needed - model.weights,
        memory.margin,
        memory.cap,
        memory.headroom,
        memory.bound_by,
    )
    return Refused(
        RefusalCode.TOO_LARGE,
        (
            f"needs {show_size(needed)} (weights {show_size(model.weights)}, {shape.length} tokens × {shape.choices}), "
            f"this node can give {show_size(holds)}: shorten the prompt or lower max_tokens or n"
        ),
        numbers,
    )


def refuse_without_room(
    shape: RequestShape, memory: Memory, model: Model, cost: int, gate: MemoryGate
) -> Refused | None:
    """Check whether `cost` bytes can be committed under the reading `memory`. Return the refusal; None if they can.

    For lack of memory, the code of the refusal is TOO_LARGE if the request can never fit on this node, else NO_ROOM.
    """
    answer = gate.check(GateSite.PREFLIGHT, memory, cost)
    if not isinstance(answer, Refused):
        return None
    if answer.code is RefusalCode.NO_ROOM:
        return refuse_too_large(shape, memory, model) or answer
    return answer
