"""Permissions for video jobs that nodes are sent."""

import pytest

from coordinator.video.permissions import VideoPermissions
from router.placement.cluster_view import NodeView
from wire.frames import AllowVideo, Frame
from wire.identity import NodeId
from wire.video import VideoState

NODE = NodeId("n1")


def view(*, allowed: bool = True, reported: bool | None = False, epoch: int = 1) -> NodeView:
    return NodeView(
        NODE, "studio", "ready", reported_at=0.0, epoch=epoch, video_allowed=allowed, video=VideoState(allowed=reported)
    )


class Sent:
    """Permissions sent so far, over a link that can be cut."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.frames: list[Frame] = []
        self.linked = True
        self.permissions = VideoPermissions(self._send, enabled=enabled)

    def _send(self, node: NodeId, frame: Frame) -> bool:
        assert node == NODE
        if self.linked:
            self.frames.append(frame)
        return self.linked


@pytest.mark.parametrize(
    ("enabled", "allowed", "reported", "sent"),
    [
        (True, True, False, [AllowVideo(True)]),
        (True, True, True, []),
        (True, False, True, [AllowVideo(False)]),
        (True, False, False, []),
        (False, True, True, [AllowVideo(False)]),
        (False, True, False, []),
        (True, True, None, []),
    ],
)
def test_a_node_is_sent_a_permission_that_it_does_not_have(
    enabled: bool, allowed: bool, reported: bool | None, sent: list[Frame]
):
    made = Sent(enabled=enabled)
    made.permissions.send_to(view(allowed=allowed, reported=reported))
    assert made.frames == sent


def test_a_permission_is_sent_once_over_each_link_and_after_each_change():
    made = Sent()
    made.linked = False
    made.permissions.send_to(view())
    made.linked = True
    for epoch, allowed in ((1, True), (1, True), (2, True), (2, False), (2, True)):
        made.permissions.send_to(view(allowed=allowed, reported=not allowed, epoch=epoch))
    assert made.frames == [AllowVideo(True), AllowVideo(True), AllowVideo(False), AllowVideo(True)]
    made.permissions.delete(NODE)
    made.permissions.delete(NODE)
    made.permissions.send_to(view(epoch=2))
    assert made.frames[4:] == [AllowVideo(True)]
