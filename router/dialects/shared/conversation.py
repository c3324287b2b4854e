"""Conversation request, the common result of all conversation dialects."""

import msgspec

from router.dispatch.request import Job
from router.placement.place import Demand
from wire.frames import Message, Params


class Request(msgspec.Struct, frozen=True, gc=False):
    """Parsed body of a conversation request."""

    demand: Demand
    messages: tuple[Message, ...]
    params: Params
    stream: bool
    include_usage: bool
    tools: str = ""
    """Tools as in `wire.frames.Generate`."""
    template: str = ""
    """Template variables as in `wire.frames.Generate`."""
    session: str = ""
    """Name of the conversation."""
    ignored: tuple[str, ...] = ()
    """Fields and tools that have no effect."""

    def job(self, key: str, request_id: str, created: int) -> Job:
        """Build the job for the dispatcher; `created` is in seconds since 1970."""
        return Job(
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
            session=self.session,
            ignored=self.ignored,
        )

    def jobs(self, key: str, request_id: str, created: int) -> tuple[Job, ...]:
        """Return the single job; see `router.dialects.shared.interface.Asked`."""
        return (self.job(key, request_id, created),)
