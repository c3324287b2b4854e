"""Variables of a model's chat template: the allowed names, and the effect of the dialects' own fields on them.

A template comes with its model, never with a request: a client's template could run without end. Variables are an
allow-list, because each name becomes an argument of the render call, which has options of its own.
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

Some clients and services send these values for an unset field.
"""


def encode_variables(variables: Mapping[str, Any] | None, **meant: object) -> str | Problem:
    """Encode the variables of the chat template as JSON for `wire.frames.Generate`; empty without variables.

    `variables` are the variables that the request sets by name. `meant` are values from other parameters, which
    `variables` override; None means no value.

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
    """Reasoning effort; None without a choice."""
    thinks: bool | None
    """Whether the model should reason; None without a choice."""
    ignored: tuple[str, ...] = ()
    """Names of fields that have no known meaning and are ignored."""


def combine_reasoning(effort: str | None, switch: bool | None, options: Mapping[str, object]) -> RequestedReasoning:
    """Combine the reasoning fields of other servers with `reasoning_effort` and `enable_thinking`.

    `options` has the fields `thinking`, `think` and `reasoning`, in order of precedence. The first two are booleans, or
    objects whose `type` is `enabled` or `disabled`; `reasoning` is an object with `effort` and `enabled`. `effort` and
    `switch` are the values of the two plain fields, which precede all of them; None for an absent field. Without any
    switch, the effort `none` turns reasoning off. Values of `options` that are not understood are named in `ignored`.
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
    """Return the template variables of a reasoning effort. The effort `none` also turns reasoning off. A variable is
    None if it is not set.
    """
    return {"reasoning_effort": effort, "enable_thinking": False if effort == "none" else None}
