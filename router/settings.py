"""The `router` section of the settings."""

from typing import Annotated, Literal

from msgspec import Meta

from host.settings_loader import Section
from wire.units import MIB


class RouterSettings(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How requests wait and where they go."""

    policy: Annotated[
        Literal["balanced", "most_headroom"],
        Meta(description="Order of the nodes with room: balanced (the fastest answer) or most_headroom (most bytes)."),
    ] = "balanced"
    queue_limit: Annotated[
        int, Meta(ge=0, description="Requests that may wait for a node with room; 0 = max(64, 4 x nodes).")
    ] = 0
    queue_seconds: Annotated[
        float, Meta(gt=0, description="Longest wait in the queue before the answer is 503 with Retry-After.")
    ] = 30.0
    swap_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "Longest wait for a model that fits only after other models are unloaded; `queue_seconds` stands still "
                "meanwhile. A model in use stays loaded for at most a quarter of it while requests for another one "
                "wait."
            ),
        ),
    ] = 300.0
    key_requests: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Requests that one API key may have under way, those in the queue included; one more is refused with "
                "429. A key's own limit on requests at once takes precedence."
            ),
        ),
    ] = 2048
    key_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=("Prompt tokens, by estimate, that one API key may have under way with more than one request."),
        ),
    ] = 16_000_000
    key_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Bytes of prompts that one API key may have under way with more than one request, and bytes of long "
                "bodies that are received from it at once."
            ),
        ),
    ] = 32 * MIB
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        Meta(
            description=(
                "Fields of a request that are not known here, and tools that would have to run here: ignore (the "
                "answer names them in x-macpool-ignored), or refuse (400)."
            )
        ),
    ] = "ignore"
    keepalive_seconds: Annotated[
        float, Meta(gt=0, description="Silence after which a stream sends its headers, and then an SSE comment.")
    ] = 10.0
    body_bytes: Annotated[
        int,
        Meta(
            gt=0,
            le=8 * MIB,
            description=(
                "Longest request body, at most 8 MiB, which is what a link to a node carries; a longer one is refused "
                "with 413."
            ),
        ),
    ] = 8 * MIB
    body_seconds: Annotated[float, Meta(gt=0, description="Longest time for a request body to arrive.")] = 60.0
    slow_client_bytes: Annotated[
        int, Meta(gt=0, description="Bytes that may wait for a client that reads slowly before its stream is ended.")
    ] = 4 * MIB
    slow_client_seconds: Annotated[
        float, Meta(gt=0, description="Time without any reading after which a stream with text waiting is ended.")
    ] = 60.0
