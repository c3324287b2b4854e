"""Conversation request, into which all dialects of conversations parse a body."""

import msgspec

from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from wire.frames import GenerationParams, Message


class ConversationRequest(msgspec.Struct, frozen=True, gc=False):
    """Parsed body of a conversation. The `ParsedRequest` of each dialect of conversations is a subclass.

    A conversation becomes a single request for the dispatcher.
    """

    demand: ResourceDemand
    messages: tuple[Message, ...]
    params: GenerationParams
    stream: bool
    include_usage: bool
    """Whether the last chunk of a stream has the usage."""
    tools: str = ""
    """JSON array of tools in OpenAI's format; empty for none."""
    set_penalties: frozenset[str] = frozenset()
    """Names of the penalties that the body sets, including those set to their defaults."""
    template: str = ""
    """JSON object of further variables of the chat template; empty for none."""
    session: str = ""
    """Name of the conversation; empty if the body has none."""
    ignored: tuple[str, ...] = ()
    """Fields and tools of the body that have no effect."""

    def to_spec(self, key: str, request_id: str, created: int) -> RequestSpec:
        """Return the request for the dispatcher.

        `key` is the id of the API key. `created` is the time of arrival in Unix seconds.
        """
        return RequestSpec(  # by position: with names it takes several times as long
            self.demand,
            key,
            request_id,
            self.messages,
            self.params,
            created,
            self.stream,
            self.tools,
            self.template,
            self.include_usage,
            "",
            (),
            self.session,
            self.ignored,
            self.set_penalties,
        )

    def to_specs(self, key: str, request_id: str, created: int) -> tuple[RequestSpec, ...]:
        """Return the single request of `to_spec`; see `router.dialects.shared.interface.ParsedRequest`."""
        return (self.to_spec(key, request_id, created),)
