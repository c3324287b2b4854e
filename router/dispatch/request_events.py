"""Events and actions of the state machine of a request (`request_state`)."""

import msgspec

from router.dispatch.request import Outcome, RequestFailure
from router.placement.candidate import Candidate, NoPlacement, Placement
from router.placement.recovery import LossKind
from wire.frames import Admitted
from wire.identity import NodeId
from wire.refusals import Refused


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of the events of a request."""


class OfAttempt(Event, frozen=True, gc=False):
    """Base of the events of one attempt. An event of an earlier attempt is ignored."""

    attempt: int


class Placed(Event, frozen=True, gc=False):
    """Event: placement has chosen a node.

    `attempt` is the number of the new attempt, `seq` the sequence number of its frame, and `need` the reservation in
    bytes.
    """

    attempt: int
    seq: int
    chosen: Candidate
    need: int


class Moved(Placed, frozen=True, gc=False):
    """Event: placement has chosen another node for a request that is on a node.

    Once the link of the new node has accepted the frame (`Delivered`), the old node gets a cancel, and its reservation
    is released.
    """

    is_loss: bool = True
    """Whether the move counts as a loss, because the old node drains or is silent."""


class Delivered(OfAttempt, frozen=True, gc=False):
    """Event: the link of the node has accepted the frame of an attempt.

    The event is applied only to an attempt that takes its request from the queue or from another node.
    """


class Undelivered(OfAttempt, frozen=True, gc=False):
    """Event: the frame of the attempt was not sent, for example because its node has no link."""


class NoRoom(Event, frozen=True, gc=False):
    """Event: the request must wait in the queue, for room on a node or for fairness.

    `result` is the decision of placement. If it is a `Placement`, a node has room, but requests of other API keys come
    first or `MAX_NODES_IN_A_ROW` nodes have refused the request.
    """

    result: Placement | NoPlacement


class DeadlinePassed(Event, frozen=True, gc=False):
    """Event: the request has waited in the queue until its deadline, and has left the queue."""


class RequestDenied(Event, frozen=True, gc=False):
    """Event: the request ends without a node.

    Causes are a wrong model name, the quota, the queue, the deadline, a refusal that holds in the whole cluster, or a
    stopping dispatcher.
    """

    outcome: Refused | RequestFailure


class NodeAdmitted(OfAttempt, frozen=True, gc=False):
    """Event: the node has counted the tokens of the prompt and committed memory for the request."""

    frame: Admitted


class NodeRefused(OfAttempt, frozen=True, gc=False):
    """Event: the node refused the request before its first token."""

    headroom: int | None = None
    """Headroom in bytes that the node reported with a refusal for lack of room; None for any other refusal."""


class FirstTokens(OfAttempt, frozen=True, gc=False):
    """Event: the first tokens of the attempt arrived."""


class AttemptLost(OfAttempt, frozen=True, gc=False):
    """Event: the attempt cannot continue on its node."""

    kind: LossKind
    """Reason: the node stops or was lost, its engine ended, or its memory does not suffice."""
    cause: RequestFailure
    """Failure of this attempt, with which the request ends if it may not be tried again (`recovery.can_recover`)."""
    stranded: RequestFailure | None = None
    """Failure with which the request ends because no other node can continue or restart it; None if one can."""


class AttemptEnded(OfAttempt, frozen=True, gc=False):
    """Event: the request finished on its node, or failed there and is not tried again."""

    outcome: Outcome


class HandedOver(Event, frozen=True, gc=False):
    """Event: no node can start the request now, and the upstream of its alias takes it."""

    upstream: str


class UpstreamEnded(Event, frozen=True, gc=False):
    """Event: the upstream answered, refused or failed the request."""

    outcome: Outcome


class Stopped(Event, frozen=True, gc=False):
    """Event: the request ends in any state, with an outcome that is not a complete answer.

    Causes are a disconnected client, a stalled reader, a prompt or answer that is too long, a stop of the coordinator,
    and an illegal event.
    """

    outcome: RequestFailure | Refused


class Action(msgspec.Struct, frozen=True, gc=False):
    """Base of the actions of a request."""


class HandOver(Action, frozen=True, gc=False):
    """Action: ask the reader of the answer to pass the request on to an upstream."""

    upstream: str


class StartAttempt(Action, frozen=True, gc=False):
    """Action: reserve memory, prefill and rows on the node of an attempt, and send the request there.

    The event `Undelivered` follows if the node has no link.
    """

    placed: Placed
    first: bool
    """Whether this is the first attempt, which has no known tokens."""


class Release(Action, frozen=True, gc=False):
    """Action: release the reservation of an attempt."""

    node: NodeId
    attempt: int


class CancelAttempt(Action, frozen=True, gc=False):
    """Action: cancel an attempt on its node."""

    node: NodeId
    attempt: int


class CorrectHeadroom(Action, frozen=True, gc=False):
    """Action: assume at most `headroom` bytes of headroom on a node that refused, until its next report."""

    node: NodeId
    headroom: int


class Enqueue(Action, frozen=True, gc=False):
    """Action: put the request into the queue. If the queue refuses it, the event `RequestDenied` follows."""

    result: Placement | NoPlacement


class Dequeue(Action, frozen=True, gc=False):
    """Action: record that the request left the queue for a node or at its deadline, and release its hold."""


class Withdraw(Action, frozen=True, gc=False):
    """Action: remove the request from the queue, because it ended there."""


class RecordPrompt(Action, frozen=True, gc=False):
    """Action: record the exact prompt tokens and the cached tokens of an admitted attempt."""

    node: NodeId
    frame: Admitted


class PrefillDone(Action, frozen=True, gc=False):
    """Action: record that the node has prefilled the prompt of an attempt."""

    node: NodeId
    attempt: int
    first: bool
    """Whether no earlier attempt of the request has sent tokens."""


class EndRequest(Action, frozen=True, gc=False):
    """Action: end the request with an outcome.

    The charge of the key's quota is settled, and the request is recorded in usage, counters and history. The outcome is
    passed to the reader.
    """

    outcome: Outcome
