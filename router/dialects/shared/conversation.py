"""A conversation as every dialect understands it in the end."""

import msgspec

from router.dispatch.request import Job
from router.placement.place import Demand
from wire.frames import Message, Params


class Request(msgspec.Struct, frozen=True, gc=False):
    """A body that was understood. `tools` and `template` as in `wire.frames.Generate`; `session` names the
    conversation, `ignored` the fields and tools that change nothing."""

    demand: Demand
    messages: tuple[Message, ...]
    params: Params
    stream: bool
    include_usage: bool
    tools: str = ""
    template: str = ""
    session: str = ""
    ignored: tuple[str, ...] = ()

    def job(self, key: str, request_id: str, created: int) -> Job:
        """Give what the dispatcher takes; `created` in seconds since 1970."""
        return Job(self.demand, key, request_id, self.messages, self.params, created, self.stream, self.tools,
                   self.template, self.include_usage, session=self.session, ignored=self.ignored)  # fmt: skip

    def jobs(self, key: str, request_id: str, created: int) -> tuple[Job, ...]:
        """See `router.dialects.shared.interface.Asked`."""
        return (self.job(key, request_id, created),)
