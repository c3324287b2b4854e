"""Schema of the body of `POST /v1/videos`, as JSON or as a form whose values are all texts."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from router.dialects.shared.common_fields import Named, StrictPart
from router.dialects.shared.field_table import FieldTable

MAX_PROMPT_CHARS = 8000
"""Maximum characters of a prompt; the text encoder reads 512 tokens."""
MAX_SEED = 2**32 - 1
_WHOLE = re.compile(r"-?[0-9]{1,12}")
_NUMBER = re.compile(r"-?[0-9]{1,6}(\.[0-9]{1,6})?")

IGNORED: Mapping[str, str] = MappingProxyType({"user": "jobs belong to the API key that made them"})
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({"input_reference": (None, ""), "n": (None, 1, "1")})
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "input_reference": "the models here are made for text alone, and take no image",
        "n": "a job makes one clip: make several",
        "model": "may be left out where the pool has only one model for videos",
        "seconds": "whole seconds, as a text or a number; 3 unless given; not together with frames",
        "size": "`WIDTHxHEIGHT`; 480x272 unless given; sides are rounded up to whole tokens (16 pixels)",
        "frames": "instead of seconds; rounded up to one more than a multiple of four",
        "fps": "frames a second; the model's own unless given",
        "steps": "denoising steps; `video.steps` unless given",
        "guidance": "the model's own unless given",
        "guidance_2": "of the second expert",
        "seed": "the same seed, node and request make the same clip",
    }
)


def _whole(value: object) -> object:
    if isinstance(value, str):
        if not _WHOLE.fullmatch(value):
            raise PydanticCustomError("whole", "this must be a whole number, not {value}", {"value": repr(value[:40])})
        return int(value)
    return value


def _number(value: object) -> object:
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            raise PydanticCustomError("number", "this must be a number, not {value}", {"value": repr(value[:40])})
        return float(value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**6 else value


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-(10**12), le=10**12)]
"""Whole number whose real limits, with their reasons, are in `coordinator.video.state.memory_model`."""
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MAX_SEED)]
Guidance = Annotated[float, BeforeValidator(_number), Field(ge=0, le=30)]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS, pattern=r"\S")]


class VideoBody(StrictPart):
    """Request body of a video."""

    prompt: Prompt
    model: Named | None = None
    seconds: Whole | None = None
    size: Annotated[str, Field(pattern=r"^[0-9]{1,5}x[0-9]{1,5}$")] | None = None
    frames: Whole | None = None
    fps: Whole | None = None
    steps: Whole | None = None
    guidance: Guidance | None = None
    guidance_2: Guidance | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    seed: Seed | None = None


VIDEO = FieldTable(VideoBody, IGNORED, NEUTRAL, INSTEAD)
