"""What Ray is told and what nodes are told of it; Ray itself runs in tests/e2e/test_videos.py."""

import asyncio
import ipaddress
import os
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.video.head import PORTS, Facts, command, environment, free_ports, names
from coordinator.video.ray_tls import RayAuthority
from coordinator.video.rays import Rays
from coordinator.video.settings import VideoSettings
from machine.announce import addresses
from router.view import ClusterView
from tests.unit.coordinator.video.test_ledger import a_node
from wire.certificate import LEAF_LIFE
from wire.frames import Frame, RayHead
from wire.identity import NodeId
from wire.video import VideoPackage, VideoState

DOCS = Path(__file__).parents[4] / "docs" / "video.md"


class Wire:
    """Nodes at addresses, and what they were told."""

    def __init__(self, **where: str) -> None:
        self.where = where
        self.told: list[tuple[str, Frame]] = []

    def send(self, node: NodeId, frame: Frame) -> bool:
        self.told.append((node, frame))
        return node in self.where

    def address(self, node: NodeId) -> str:
        return self.where.get(node, "")


def rays(folder: Path, wire: Wire, **settings: Any) -> Rays:
    return Rays(folder, VideoSettings(**settings), lambda: "10.0.0.1", wire, lambda lease, why: None)


def up(made: Rays) -> None:
    """Let the head be up without starting it."""
    made._running = True
    made._head.facts = Facts("10.0.0.1", 6380, "s3cret", "2.60.0")


def test_no_secret_is_on_the_command_line_and_every_process_demands_the_token(tmp_path: Path):
    words = command("10.0.0.1", 6380, Path("/tmp/x"))
    assert not any("token" in word or "key" in word for word in words)
    found = environment(tmp_path, {"PATH": "/bin", "OPENAI_API_KEY": "junk", "RAY_AUTH_MODE": "disabled"}, tls=True)
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN_PATH"]) == ("token", str(tmp_path / "token"))
    assert found["RAY_USE_TLS"] == "1"
    assert "OPENAI_API_KEY" not in found
    assert "RAY_USE_TLS" not in environment(tmp_path, {}, tls=False)


def test_the_ports_are_those_of_the_manual():
    words = dict(word[2:].split("=", 1) for word in command("10.0.0.1", 6380, Path("/x")) if word.startswith("--") and
                 "=" in word)  # fmt: skip
    used = {int(value) for name, value in words.items() if name.endswith("port")}
    assert min(used) == VideoSettings().ray_port == 6380
    assert max(used) == 6380 + PORTS - 1
    assert f"{PORTS} from `video.ray_port` (6380)" in DOCS.read_text()
    assert words["num-cpus"] == "0"
    assert 20_000 <= free_ports("127.0.0.1") < 50_000


def test_papers_name_addresses_and_belong_to_an_authority_of_rays_own(tmp_path: Path):
    papers = RayAuthority(tmp_path).papers(["10.0.0.7", "fd00::7"])
    authority = x509.load_pem_x509_certificate(papers.authority)
    certificate = x509.load_pem_x509_certificate(papers.certificate)
    certificate.verify_directly_issued_by(authority)
    said = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(one) for one in said.get_values_for_type(x509.IPAddress)} == {
        "10.0.0.7", "fd00::7", "127.0.0.1", "::1"}  # fmt: skip
    assert said.get_values_for_type(x509.UniformResourceIdentifier) == [], "it names no member of the cluster"
    assert load_pem_private_key(papers.key, None).public_key() == certificate.public_key()
    again = RayAuthority(tmp_path)
    assert again.papers(["10.0.0.8"]).authority == papers.authority
    assert again.papers(["fd00::7", "10.0.0.7"]) == papers, "who has another certificate has to start Ray anew"
    later = RayAuthority(tmp_path, lambda: time.time() + LEAF_LIFE * 0.7)
    assert later.papers(["10.0.0.7", "fd00::7"]) != papers
    assert (tmp_path / "ray-authority.pem").stat().st_mode & 0o777 == 0o600


def test_loopback_means_every_address_of_this_machine():
    """Ray takes 127.0.0.1 for the machine's own address, and dials that."""
    assert set(names("127.0.0.1")) == {"127.0.0.1", *addresses()}
    assert names("10.0.0.1") == ("10.0.0.1",)
    for name in names("127.0.0.1"):
        ipaddress.ip_address(name)


@pytest.mark.parametrize(
    ("video", "settings"),
    [
        (VideoState(), {}),
        (VideoState(True), {}),
        (VideoState(False, "no environment", "", (VideoPackage("wan"),)), {}),
        (VideoState(True, "", "", (VideoPackage("wan", cause="broken"),)), {}),
        (VideoState(True, "", "", (VideoPackage("wan"),)), {"enabled": False}),
    ],
)
async def test_where_nobody_offers_videos_nothing_runs(tmp_path: Path, video: VideoState, settings: dict[str, Any]):
    wire = Wire(a="10.0.0.2")
    made = rays(tmp_path, wire, **settings)
    try:
        made.see(ClusterView((a_node("a", video=video),)))
        assert not made._running
        assert os.listdir(tmp_path) == []
        assert wire.told == []
        assert len(asyncio.all_tasks()) == 1
    finally:
        await made.close()


async def test_each_node_is_told_once_over_each_link_with_papers_for_its_address(tmp_path: Path):
    wire = Wire(a="10.0.0.2", b="127.0.0.1")
    made = rays(tmp_path, wire)
    up(made)
    for _ in range(3):
        made.see(ClusterView((a_node("a"), a_node("b"), a_node("c"))))
    heads = {node: frame for node, frame in wire.told if isinstance(frame, RayHead)}
    assert len(wire.told) == 2, "c is not linked"
    assert (heads["a"].address, heads["a"].token, heads["a"].host) == ("10.0.0.1:6380", "s3cret", "10.0.0.2")
    assert heads["b"].host == "10.0.0.1", "a node on this machine is where this machine is"
    certificate = x509.load_pem_x509_certificate(heads["a"].certificate)
    said = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("10.0.0.2") in said.get_values_for_type(x509.IPAddress)
    assert heads["a"].key != heads["b"].key
    made.see(ClusterView((a_node("a", epoch=2),)))
    assert [node for node, _ in wire.told][2:] == ["a"], "a new link"
    wire.where["a"] = "10.0.0.9"
    made.see(ClusterView((a_node("a", epoch=2),)))
    assert wire.told[-1][1].host == "10.0.0.9", "another address, another certificate"  # pyright: ignore
    made.forget(NodeId("a"))
    assert "a" not in made._told
    await made.close()


async def test_without_tls_nothing_is_signed(tmp_path: Path):
    wire = Wire(a="10.0.0.2")
    made = rays(tmp_path, wire, ray_tls=False)
    up(made)
    made.see(ClusterView((a_node("a"),)))
    assert isinstance(wire.told[0][1], RayHead)
    assert wire.told[0][1].certificate == b""
    assert not (tmp_path / "authority").exists()
    await made.close()


async def test_an_actor_without_a_broker_is_not_started(tmp_path: Path):
    failed: list[str] = []
    made = Rays(tmp_path, VideoSettings(), lambda: "10.0.0.1", Wire(), lambda lease, why: failed.append(lease))
    made.start("lease_1", 1, "ray", "/f", 2**30)
    made.stop("lease_1")
    assert failed == ["lease_1"]
