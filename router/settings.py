"""The `router` section of the settings."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from host.settings_loader import Section
from router.aliases import find_alias_fault
from router.profiles import ProfileSettings, find_profile_fault
from router.upstreams import UpstreamSettings, find_upstream_fault
from wire.units import MIB

CandidateName = Annotated[str, Meta(min_length=1, max_length=200)]


class RouterSettings(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `router` section of the settings: placement policy, queue, and limits of requests."""

    policy: Annotated[
        Literal["balanced", "most_headroom"],
        Meta(
            description=(
                "Order of the nodes that have headroom: balanced (shortest expected time) or most_headroom (most "
                "free bytes)."
            )
        ),
    ] = "balanced"
    queue_limit: Annotated[int, Meta(ge=0, description="Maximum requests in the queue; 0: max(64, 4 x nodes).")] = 0
    queue_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Maximum time in the queue. Then the request gets a 503 with Retry-After.")
    ] = 30.0
    swap_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "Maximum wait for a model that fits only after other models are unloaded. The queue timeout "
                "does not run during this wait. While requests for another model wait, a model in use stays loaded "
                "for at most a quarter of this time."
            ),
        ),
    ] = 300.0
    max_requests_per_key: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum open requests of one API key, queued requests included. Further requests are refused "
                "with 429. The concurrency limit of a key, if it has one, applies instead."
            ),
        ),
    ] = 2048
    max_prompt_tokens_per_key: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum estimated prompt tokens in all open requests of one API key. If the key has no other open "
                "request, any size is allowed."
            ),
        ),
    ] = 16_000_000
    max_body_bytes_per_key: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum prompt bytes in all open requests of one API key. If the key has no other open request, "
                "any size is allowed."
            ),
        ),
    ] = 32 * MIB
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        Meta(
            description=(
                "How to treat unknown fields, and tools that would have to run on the server: ignore (the header "
                "x-macpool-ignored names them) or refuse (400)."
            )
        ),
    ] = "ignore"
    keepalive_seconds: Annotated[
        float,
        Meta(
            gt=0, description="Seconds without output after which a stream sends its headers, and later an SSE comment."
        ),
    ] = 10.0
    max_body_bytes: Annotated[
        int,
        Meta(
            gt=0,
            le=8 * MIB,
            description=(
                "Maximum bytes of a request body, and of all long bodies that one API key sends at the same time. "
                "A longer body is refused with 413. At most 8 MiB, the limit of a link to a node."
            ),
        ),
    ] = 8 * MIB
    body_timeout_seconds: Annotated[float, Meta(gt=0, description="Maximum time to receive a request body.")] = 60.0
    slow_client_bytes: Annotated[
        int,
        Meta(
            gt=0,
            description=(
                "Maximum size of the unsent part of a stream. Above it, the stream of a slow client is ended. Each "
                "character counts as 1, even if it has several bytes. Each delta adds 256, each log probability 96."
            ),
        ),
    ] = 4 * MIB
    slow_client_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Maximum time that a stream with unsent text makes no progress. Then the stream is ended.",
        ),
    ] = 60.0
    aliases: Annotated[
        dict[str, tuple[CandidateName, ...]],
        Meta(
            description=(
                'Aliases with their ordered candidates, such as `coder = ["big-30b", "small-8b"]` in '
                "`[router.aliases]`. The first candidate that can start immediately gets the request."
            )
        ),
    ] = msgspec.field(default_factory=dict[str, tuple[str, ...]])
    profiles: Annotated[
        dict[str, ProfileSettings],
        Meta(
            description=(
                "Profiles, each a table `[router.profiles.NAME]` with sampling defaults, template arguments and a "
                "context limit. Clients select one with `MODEL:NAME`."
            )
        ),
    ] = msgspec.field(default_factory=dict[str, ProfileSettings])
    upstreams: Annotated[
        dict[str, UpstreamSettings],
        Meta(
            description=(
                "Other servers with OpenAI's API, each a table `[router.upstreams.NAME]` with url, model and key_file. "
                "An alias can have one as its last candidate, `upstream:NAME`. Without upstreams, no request leaves "
                "the pool."
            )
        ),
    ] = msgspec.field(default_factory=dict[str, UpstreamSettings])
    upstreams_by_default: Annotated[
        bool,
        Meta(
            description=(
                "Whether API keys without model and label limits may use upstreams. `cluster key limit --upstream` and "
                "`--no-upstream` override this for one key."
            )
        ),
    ] = True

    def __post_init__(self) -> None:
        """Raise `ValueError` with one sentence if the upstreams, profiles or aliases have a fault."""
        fault = (
            find_upstream_fault(self.upstreams)
            or find_profile_fault(self.profiles)
            or find_alias_fault(self.aliases, self.upstreams)
        )
        if fault:
            raise ValueError(fault)
