"""Variables of a model's chat template: which of them a client may set, and what the dialects' own words mean to it.

A template comes with its model, never with a request: one of a client's could run for ever. Variables are an
allow-list, because whatever is named goes into the call that renders, where a name may mean something to the program.
"""

from collections.abc import Mapping
from typing import Any, Literal

from router.dialects.limits import VARIABLES_BYTES
from router.dialects.strict_json import write
from router.problems import Problem, invalid

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

VARIABLES = frozenset({
    "add_vision_id", "builtin_tools", "clear_thinking", "custom_instructions", "date_string", "documents", "enable_cot",
    "enable_thinking", "force_reasoning", "interleaved_thinking", "keep_all_reasoning", "keep_past_thinking",
    "language", "model_identity", "persona", "preserve_thinking", "python_tools", "reasoning", "reasoning_effort",
    "reasoning_strategy", "role", "system_message", "system_prompt", "task", "think", "thinking", "thinking_budget",
    "thinking_mode", "tools_in_user_message", "xml_tools",
})  # fmt: skip
"""What the chat templates of the models that we know look for."""


def variables(given: Mapping[str, Any] | None, **meant: object) -> str | Problem:
    """Write the template's variables as `wire.frames.Generate` has them; what is `given` by name goes before what
    another parameter `meant`, and None means nothing."""
    given = given or {}
    strange = sorted(given.keys() - VARIABLES)
    if strange:
        text = f"{strange[0][:64]} is no variable that a client may set; those are {', '.join(sorted(VARIABLES))}"
        return invalid(text, f"chat_template_kwargs.{strange[0][:64]}")
    found = {name: value for name, value in meant.items() if value is not None} | dict(given)
    return write(found, "chat_template_kwargs", VARIABLES_BYTES) if found else ""


def thinking(effort: str | None) -> dict[str, object]:
    """Give what an effort means to a template: `none` also turns thinking off where that is a switch."""
    return {"reasoning_effort": effort, "enable_thinking": False if effort == "none" else None}
