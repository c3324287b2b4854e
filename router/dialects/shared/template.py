"""Variables of a model's chat template: the allowed names, and the effect of the dialects' own fields on them.

A template comes with its model, never with a request, because a client's template could run without end. Only the
variables of an allow-list are accepted. Each name becomes an argument of the render call, which also has other options.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from pydantic import BeforeValidator

from router.admission.request_limits import MAX_VARIABLES_BYTES, TEMPLATE_VARIABLES
from router.dialects.shared.strict_json import Body, encode_json
from router.errors import Problem, build_invalid

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = frozenset(get_args(Effort))


def _remove_default(effort: object) -> object:
    return None if isinstance(effort, str) and effort in ("", "default", "auto") else effort


EffortField = Annotated[Effort | None, BeforeValidator(_remove_default)]
"""Reasoning effort of a body. An empty text, `default` and `auto` become None, which leaves the choice to the model.

Some clients and services send these values if no effort is set.
"""


def encode_variables(variables: Mapping[str, Any] | None, **meant: object) -> str | Problem:
    """Encode the variables of the chat template as JSON for `wire.frames.Generate`; empty if there are none.

    `variables` are the variables that the request sets by name; None for none. `meant` are the variables that follow
    from other fields, which `variables` override. A value of None in `meant` is omitted.

    Return a 400 problem for a variable that is not in `TEMPLATE_VARIABLES`, and for more than `MAX_VARIABLES_BYTES`.
    Return it also for values with more than `MAX_JSON_DEPTH` levels, and for numbers that are not finite.
    """
    variables = variables or {}
    strange = sorted(variables.keys() - TEMPLATE_VARIABLES)
    if strange:
        known = ", ".join(sorted(TEMPLATE_VARIABLES))
        text = f"{strange[0][:64]} is not a template variable that a client may set: use {known}"
        return build_invalid(text, f"chat_template_kwargs.{strange[0][:64]}")
    combined = {name: value for name, value in meant.items() if value is not None} | dict(variables)
    return encode_json(combined, "chat_template_kwargs", MAX_VARIABLES_BYTES) if combined else ""


class RequestedReasoning(NamedTuple):
    """Reasoning that a client requests, combined from all reasoning fields of its body."""

    effort: str | None
    """Reasoning effort; None if the body does not set it."""
    thinks: bool | None
    """Whether the model should reason; None if the body does not set it."""
    ignored: tuple[str, ...] = ()
    """Names of the fields that are ignored, because their values are not understood."""


def combine_reasoning(effort: str | None, switch: bool | None, options: Mapping[str, object]) -> RequestedReasoning:
    """Combine the reasoning fields of other servers with `reasoning_effort` and `enable_thinking`.

    `effort` and `switch` are the values of `reasoning_effort` and `enable_thinking`, which override the other fields;
    None for an absent field. `options` has the fields `thinking`, `think` and `reasoning`, in order of precedence. The
    first two are booleans, or objects whose `type` is `enabled` or `disabled`. `reasoning` is an object with `effort`
    and `enabled`.

    If no field switches reasoning on or off, the effort `none` turns it off.
    """
    ignored: list[str] = []
    for name in ("thinking", "think"):
        parsed = _parse_switch(options[name])
        if parsed is None and options[name] is not None:
            ignored.append(name)
        switch = parsed if switch is None else switch
    reasoning = options["reasoning"]
    if isinstance(reasoning, dict):
        rest = dict(cast("Body", reasoning))
        wanted, enabled = rest.get("effort"), rest.get("enabled")
        if isinstance(wanted, str) and wanted in EFFORTS:
            effort = effort or wanted
            del rest["effort"]
        if isinstance(enabled, bool):
            switch = enabled if switch is None else switch
            del rest["enabled"]
        ignored += [f"reasoning.{name}" for name, value in rest.items() if value is not None]
    elif reasoning is not None:
        ignored.append("reasoning")
    return RequestedReasoning(effort, False if switch is None and effort == "none" else switch, tuple(ignored))


def _parse_switch(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    kind = cast("Body", value).get("type") if isinstance(value, dict) else None
    return {"enabled": True, "disabled": False}.get(kind) if isinstance(kind, str) else None


def get_reasoning_variables(effort: str | None) -> dict[str, object]:
    """Return the template variables for a reasoning effort. A variable is None if it is not set.

    The effort `none` also turns reasoning off.
    """
    return {"reasoning_effort": effort, "enable_thinking": False if effort == "none" else None}
