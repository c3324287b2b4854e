"""Video models and leases, through the API of the coordinator, with a node on a real link."""

import httpx

from coordinator.video.settings import VideoSettings
from router.admission.rate_limits import KeyLimits
from tests.support.cluster.cluster_port import Line, Port, a_report
from tests.unit.coordinator.video.state.test_lease_placement import WAN, a_node
from wire.frames import LeaseRequest
from wire.units import GIB


async def link_video_node(port: Port) -> Line:
    studio = port.member("studio")
    port.application.nodes.administration.set_video_allowed(studio.node, on=True)
    view = a_node("studio")
    line = await port.link(studio, a_report(video=view.video, memory=view.memory))
    await port.until(lambda: port.state(studio) == "ready")
    return line


async def test_video_models_are_those_that_the_key_may_use(port: Port, boss: httpx.AsyncClient):
    await link_video_node(port)
    limited = port.application.admin.create_key("app", ["infer"], None, KeyLimits(models=("other*",)))["key"]
    everything = (await boss.get("/api/v1/videos/models")).json()
    async with port.client_of(limited) as client:
        nothing = (await client.get("/api/v1/videos/models")).json()
    assert everything["lease"] == nothing["lease"] == VideoSettings().lease_bytes == 36 * GIB
    assert [row["name"] for row in everything["models"]] == [WAN.name]
    assert (nothing["models"], nothing["profiles"]) == ([], [])


async def test_a_lease_is_listed_from_its_request_on(port: Port, boss: httpx.AsyncClient):
    line = await link_video_node(port)
    assert (await boss.get("/api/v1/leases")).json() == {"schema": 1, "leases": []}
    made = await boss.post("/v1/videos", json={"model": WAN.name, "prompt": "a cat"})
    assert made.status_code == 200, made.text
    asked = await line.until(LeaseRequest)
    (row,) = (await boss.get("/api/v1/leases")).json()["leases"]
    assert (row["id"], row["job"], row["name"], row["size"]) == (asked.lease, made.json()["id"], "studio", 36 * GIB)
    assert (row["granted"], row["phase"], row["orphan"]) == (False, "asked", False)
