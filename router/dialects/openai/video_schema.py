"""Schema of the body of `POST /v1/videos`, which is JSON, or a form whose values are all texts."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from router.dialects.shared.common_fields import Named, StrictPart
from router.dialects.shared.field_table import FieldTable

MAX_PROMPT_CHARS = 8000
"""Maximum characters of a prompt or of a negative prompt."""
MAX_SEED = 2**32 - 1
_INTEGER = re.compile(r"-?[0-9]{1,12}")
_NUMBER = re.compile(r"-?[0-9]{1,6}(\.[0-9]{1,6})?")

IGNORED: Mapping[str, str] = MappingProxyType({"user": "jobs belong to the API key that created them"})
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({"input_reference": (None, ""), "n": (None, 1, "1")})
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "input_reference": "the models here accept only text, no image",
        "n": "a job generates one clip: create several jobs",
        "model": "optional if the pool has only one video model",
        "seconds": "whole seconds, as a text or a number; default 3; cannot be combined with frames",
        "size": "`WIDTHxHEIGHT`; default 480x272; sides are rounded up to whole tokens (16 pixels)",
        "frames": "instead of seconds; rounded up to one more than a multiple of four",
        "fps": "frames per second; default of the model",
        "steps": "denoising steps; default `video.default_steps`",
        "guidance": "default of the model",
        "guidance_2": "guidance of the second expert; default of the model",
        "seed": "the same request with the same seed on the same node gives the same clip",
    }
)


def _parse_whole_number(value: object) -> object:
    if isinstance(value, str):
        if not _INTEGER.fullmatch(value):
            raise PydanticCustomError("whole", "this must be a whole number, not {value}", {"value": repr(value[:40])})
        return int(value)
    return value


def _parse_number(value: object) -> object:
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            raise PydanticCustomError("number", "this must be a number, not {value}", {"value": repr(value[:40])})
        return float(value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**6 else value


WholeNumber = Annotated[int, BeforeValidator(_parse_whole_number), Field(ge=-(10**12), le=10**12)]
"""Whole number, or its text. `coordinator.video.state.clip_plan` has the limits of each field, with the reasons."""
Seed = Annotated[int, BeforeValidator(_parse_whole_number), Field(ge=0, le=MAX_SEED)]
Guidance = Annotated[float, BeforeValidator(_parse_number), Field(ge=0, le=30)]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS, pattern=r"\S")]


class VideoBody(StrictPart):
    """Request body of `POST /v1/videos`."""

    prompt: Prompt
    model: Named | None = None
    seconds: WholeNumber | None = None
    size: Annotated[str, Field(pattern=r"^[0-9]{1,5}x[0-9]{1,5}$")] | None = None
    frames: WholeNumber | None = None
    fps: WholeNumber | None = None
    steps: WholeNumber | None = None
    guidance: Guidance | None = None
    guidance_2: Guidance | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    seed: Seed | None = None


VIDEO = FieldTable(VideoBody, IGNORED, NEUTRAL, INSTEAD)
