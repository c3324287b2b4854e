"""Sources of a download: which one is used, how long each is waited for, and the error when none is left."""

import time

import pytest

from node.hub.child_messages import ClusterFiles
from node.hub.download.retry_rules import MAX_WAIT_SECONDS
from node.hub.download.source_client import SourceClient
from node.hub.download.source_errors import SourceError, SourceFault, SourceLimited, SourcePending, SourceRefusal
from node.hub.download.source_pool import (
    HUB_TIMEOUT_SECONDS,
    MIRROR_TIMEOUT_SECONDS,
    PENDING_TIMEOUT_SECONDS,
    DownloadSource,
    SourcePool,
)
from node.hub.errors import ModelFileError
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelSource, SourceKind

TIMEOUT = 20.0
FAULT = SourceFault("the connection failed")
GATED = SourceRefusal(ModelOrderCode.GATED, "a/b is gated")
CLIENT = SourceClient(ModelSource(SourceKind.HUB, "http://127.0.0.1:9"), ClusterFiles(), connections=1)
WRONG = SourceRefusal(ModelOrderCode.CONTENT_MISMATCH, "a/b has other bytes there")


def make_source(silent: float = 0.0, timeout: float = TIMEOUT) -> DownloadSource:
    """Return a source whose last progress was `silent` seconds ago."""
    return DownloadSource(CLIENT, timeout, progressed_at=time.monotonic() - silent)


def lose(source: DownloadSource, error: SourceError) -> ModelFileError:
    """Record an error after which the source is lost, and return the reason."""
    assert source.record_error(error) == 0.0, "nothing is waited for"
    assert source.lost is not None
    return source.lost


def test_waits_grow_with_faults_in_a_row_until_there_is_progress():
    source = make_source()
    for longest in (0.25, 0.5, 1.0):
        assert longest / 2 <= source.record_error(FAULT) <= longest
        assert source.waiting == str(FAULT)
    source.record_progress()
    assert source.waiting == ""
    assert source.record_error(FAULT) <= 0.25
    assert source.lost is None


def test_a_source_is_lost_after_its_time_without_progress():
    source = make_source(TIMEOUT - 1)
    source.record_error(FAULT)
    assert source.lost is None
    source.record_progress()
    source.record_error(FAULT)
    assert source.lost is None, "the time begins again with progress"
    lost = lose(make_source(TIMEOUT + 1), FAULT)
    assert lost.code == ModelOrderCode.SOURCE_LOST
    assert lost.message == f"{FAULT}, without progress for 21 s"


@pytest.mark.parametrize("timeout", [TIMEOUT, PENDING_TIMEOUT_SECONDS + 60])
def test_a_mirror_that_downloads_itself_is_waited_for_longer(timeout: float):
    pending = SourcePending("the mirror still downloads", 1.5)
    limit = max(timeout, PENDING_TIMEOUT_SECONDS)
    source = make_source(limit - 1, timeout)
    assert (source.record_error(pending), source.lost) == (1.5, None)
    assert lose(make_source(limit + 1, timeout), pending).code == ModelOrderCode.SOURCE_LOST


@pytest.mark.parametrize(
    ("silent", "seconds", "is_lost"),
    [
        (0.0, MAX_WAIT_SECONDS, False),
        (TIMEOUT + 1, 5.0, False),
        (MAX_WAIT_SECONDS + 1, 5.0, True),
        (0.0, MAX_WAIT_SECONDS + 1, True),
    ],
)
def test_a_rate_limit_is_waited_for_up_to_its_maximum(silent: float, seconds: float, is_lost: bool):
    source, limited = make_source(silent), SourceLimited("the hub limits the rate", seconds)
    if not is_lost:
        assert (source.record_error(limited), source.lost) == (seconds, None)
        return
    lost = lose(source, limited)
    assert (lost.code, lost.retry_after) == (ModelOrderCode.RATE_LIMITED, seconds)
    assert lost.message.startswith("the hub limits the rate: pull again after that time")


def test_a_refusal_loses_a_source_for_good_with_its_first_reason():
    source = make_source()
    lost = lose(source, GATED)
    assert (lost.code, lost.message) == (ModelOrderCode.GATED, "a/b is gated")
    assert lose(source, WRONG) is lost


def test_the_time_without_progress_begins_with_the_first_request():
    source = make_source()
    source.progressed_at = 0.0
    pool = SourcePool([source])
    before = time.monotonic()
    assert pool.choose(frozenset()) is source
    began = source.progressed_at
    assert began >= before
    pool.choose(frozenset())
    assert source.progressed_at == began


def test_choose_returns_the_first_source_that_is_neither_lost_nor_excluded():
    first, second, third = sources = [make_source() for _ in range(3)]
    pool = SourcePool(sources)
    assert pool.current is None
    assert pool.choose(frozenset()) is pool.current is first
    lose(first, GATED)
    assert pool.choose(frozenset()) is pool.current is second
    assert pool.choose(frozenset({second})) is pool.current is third
    assert pool.choose(frozenset({second, third})) is None
    assert pool.current is third


def test_record_progress_counts_the_bytes_of_all_sources():
    first, second = make_source(TIMEOUT + 1), make_source()
    pool = SourcePool([first, second])
    pool.record_progress(first, 5)
    pool.record_progress(second, 7)
    assert pool.fetched == 12
    assert pool.record_error(first, FAULT) > 0
    assert first.lost is None, "the bytes were progress"


def test_open_uses_the_timeouts_of_the_kinds_and_names_unusable_sources():
    cluster = ClusterFiles(coordinator="127.0.0.1:8081")
    sources = (
        ModelSource(SourceKind.HUB, "https://hub.example"),
        ModelSource("future", "https://127.0.0.1:9"),
        ModelSource(SourceKind.MIRROR, "http://127.0.0.1:9", "token", "n1"),
        ModelSource(SourceKind.RELAY, "", "token", "n1"),
    )
    pool = SourcePool.open(sources, cluster, 0.0, 1)
    assert [source.client.url for source in pool.sources] == ["https://hub.example", "relay://127.0.0.1:8081"]
    assert [source.timeout for source in pool.sources] == [HUB_TIMEOUT_SECONDS, MIRROR_TIMEOUT_SECONDS]
    assert pool.unusable == ("a mirror cannot be used: its address must begin with https",)
    assert [source.timeout for source in SourcePool.open(sources, cluster, 3.0, 1).sources] == [3.0, 3.0]


def test_describe_faults_has_lost_and_waiting_sources():
    lost, good, waiting = sources = [make_source() for _ in range(3)]
    pool = SourcePool(sources)
    assert pool.describe_faults() == ""
    lose(lost, GATED)
    pool.record_error(waiting, FAULT)
    pool.record_progress(good, 1)
    assert pool.describe_faults() == "a/b is gated; the connection failed"


def build_error(*errors: SourceError, unusable: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return code and text of the error of a download whose sources are lost by these errors."""
    sources = [make_source() for _ in errors]
    for source, error in zip(sources, errors, strict=True):
        lose(source, error)
    built = SourcePool(sources, unusable).build_error()
    return built.code, built.message


def test_the_error_without_a_source_is_the_one_that_says_most():
    absent = SourceRefusal(ModelOrderCode.NOT_FOUND, "a/b does not exist")
    assert build_error(WRONG) == (ModelOrderCode.CONTENT_MISMATCH, WRONG.args[0])
    assert build_error(GATED, WRONG) == (ModelOrderCode.GATED, "a/b is gated")
    assert build_error(GATED, absent, WRONG) == (ModelOrderCode.NOT_FOUND, "a/b does not exist")
    code, text = build_error(WRONG, WRONG, unusable=("a mirror cannot be used: no address",))
    assert code == ModelOrderCode.SOURCE_LOST
    assert text == (
        "all sources are lost, the received pieces stay: a mirror cannot be used: no address; "
        f"{WRONG.args[0]}; {WRONG.args[0]}"
    )
    assert build_error(WRONG, unusable=("a relay cannot be used: x",))[0] == ModelOrderCode.SOURCE_LOST


def test_the_error_of_an_order_without_a_usable_source_has_each_reason():
    assert build_error() == (ModelOrderCode.SOURCE_LOST, "this node can use no source: the order names none")
    unusable = ("a hub cannot be used: x", "a mirror cannot be used: y")
    assert build_error(unusable=unusable)[1] == f"this node can use no source: {'; '.join(unusable)}"
