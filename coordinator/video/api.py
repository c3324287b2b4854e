"""Routes of `/v1/videos`, compatible with OpenAI's library. They are plain ASGI, before the control application.

A job belongs to the API key that created it. Other keys get a 404, except keys with the scope `admin`.
"""

import hashlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from coordinator.state.access_admin import LOCAL_KEY_NAME
from coordinator.state.store_errors import StoreError
from coordinator.video.artifacts import THUMBNAIL, VIDEO
from coordinator.video.controller import VideoController
from coordinator.video.file_response import send_file
from coordinator.video.multipart import get_boundary, read_form
from coordinator.video.state.admission import admit_clip
from coordinator.video.state.jobs import JobState, StoredFile, VideoJob, to_row
from router.admission.api_keys import ApiKey, KeyRing
from router.admission.rate_limits import RateLimits
from router.dialects.openai import video_schema
from router.dialects.openai.video_schema import VideoBody
from router.dialects.shared.strict_json import read_object
from router.errors import Header, Problem, build_invalid, build_not_found, from_refused
from router.http.app import App, authorize
from router.http.exchange import Exchange, Receive, Scope
from router.http.sse import Send
from router.settings import RouterSettings
from wire.refusals import RefusalCode

VIDEOS = "/v1/videos"
MAX_JSON_BYTES = 64 * 1024
"""Maximum bytes of a JSON body, even if the router's `max_body_bytes` is higher. It does not apply to forms."""
MAX_LISTED = 100
"""Maximum videos in one response with a list."""
DEFAULT_LISTED = 20
"""Videos in one response with a list, without the parameter `limit`."""
MAX_KEY_CHARS = 200
"""Maximum characters of an Idempotency-Key."""
_ID = re.compile(r"video_[0-9a-f]{24}")
_READ = ("GET", "HEAD")
NOT_OFFERED: Mapping[str, str] = {
    "remix": "a finished video cannot be made again with other words: make a new one with the prompt you want",
    "edits": "a finished video cannot be edited",
    "extensions": "a finished video cannot be made longer",
    "characters": "characters are not offered by the models of a pool",
}
"""Reasons why routes of OpenAI's API are not supported, by the last word of their path."""
VARIANTS = {"video": VIDEO, "thumbnail": THUMBNAIL}
"""Kinds of files by their name in the API (`variant`)."""


class AnswerCounter(Protocol):
    """Counter of HTTP responses, for metrics."""

    def count_answer(self, status: int) -> None:
        """Count one HTTP response by its status code."""
        ...


class VideoApp:
    """ASGI app for the video routes, which passes requests for all other paths to `control`."""

    def __init__(
        self,
        controller: VideoController,
        keys: KeyRing,
        quotas: RateLimits,
        settings: RouterSettings,
        counters: AnswerCounter,
        control: App,
    ) -> None:
        self._controller = controller
        self._keys = keys
        self._quotas = quotas
        self._settings = settings
        self._counters = counters
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request to a video route, or pass the request to `control`."""
        path: str = scope["path"] if scope["type"] == "http" else ""
        if path != VIDEOS and not path.startswith(VIDEOS + "/"):
            await self._control(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=None))
        try:
            await self._dispatch(exchange, path, query)
        except StoreError as error:
            await exchange.refuse(Problem(503, "storage_failed", str(error)))
        finally:
            self._counters.count_answer(exchange.status)

    async def _dispatch(self, exchange: Exchange, path: str, query: Mapping[str, str]) -> None:
        if path == VIDEOS:
            await self._answer_collection(exchange, query)
            return
        name, *rest = path[len(VIDEOS) + 1 :].split("/")
        below = rest[0] if len(rest) == 1 else ""
        if name in NOT_OFFERED or below == "remix":
            await self._answer_not_offered(exchange, "remix" if below == "remix" else name)
        elif not rest:
            await self._answer_job(exchange, name)
        elif below == "content":
            await self._answer_content(exchange, name, query)
        elif below == "cancel":
            await self._answer_cancel(exchange, name)
        else:
            await exchange.refuse(build_not_found(path))

    # -- the collection -------------------------------------------------------------------

    async def _answer_collection(self, exchange: Exchange, query: Mapping[str, str]) -> None:
        key = authorize(self._keys, exchange, (*_READ, "POST"), "infer")
        if isinstance(key, Problem):
            await exchange.refuse(key)
        elif exchange.method == "POST":
            await self._answer_create(exchange, key)
        else:
            await exchange.respond(self._render_list(key, query))

    async def _answer_create(self, exchange: Exchange, key: ApiKey) -> None:
        body = await self._read_body(exchange)
        if body is None:
            return
        parsed = body if isinstance(body, Problem) else _parse_body(body)
        job = parsed if isinstance(parsed, Problem) else await self._create_job(exchange, key, parsed)
        if isinstance(job, Problem):
            await exchange.refuse(job)
        else:
            await self._send_job(exchange, job)

    async def _create_job(self, exchange: Exchange, key: ApiKey, parsed: VideoBody) -> VideoJob | Problem:
        idempotency = (exchange.get_header(b"idempotency-key") or b"").decode("latin-1")
        if len(idempotency) > MAX_KEY_CHARS or not idempotency.isprintable():
            return build_invalid(f"Idempotency-Key must be at most {MAX_KEY_CHARS} printable letters")
        digest = hashlib.sha256(parsed.model_dump_json().encode()).hexdigest()
        controller, job_key = self._controller, _get_job_key(key)
        known = controller.find_idempotent_job(job_key, idempotency, digest)
        if known is not None and not known.same:
            return Problem(409, "idempotency_key_reused", "this Idempotency-Key was used for another request")
        if known is not None:
            await controller.wait_until_stored(known.job.id)
            return known.job
        wanted = admit_clip(
            parsed, controller.view, controller.table, controller.profiles, controller.settings, key.limits
        )
        if isinstance(wanted, Problem):
            return wanted
        mine = [job for job in controller.table.jobs.values() if job.open and job.key == job_key]
        queued = sum(job.state == JobState.QUEUED for job in mine)
        refused = self._quotas.admit_video(key.id, wanted.model, len(mine), queued, time.monotonic())
        if refused is not None:
            return from_refused(refused)
        return await controller.submit_job(wanted, job_key, idempotency, digest)

    async def _read_body(self, exchange: Exchange) -> dict[str, Any] | Problem | None:
        """Read a form or a JSON object; None if the client has disconnected."""
        settings, content_type = self._settings, exchange.get_header(b"content-type") or b"application/json"
        boundary = get_boundary(content_type)
        if boundary is not None:
            return await read_form(exchange, boundary, settings.max_body_bytes, settings.body_timeout_seconds)
        if content_type.partition(b";")[0].strip().lower() != b"application/json":
            kind = content_type[:60].decode("latin-1")
            return build_invalid(
                f"the body must be application/json or multipart/form-data with a boundary, not {kind!r}"
            )
        short = msgspec.structs.replace(settings, max_body_bytes=min(settings.max_body_bytes, MAX_JSON_BYTES))
        body = await exchange.receive_body(short)
        return read_object(body) if isinstance(body, bytes) else body

    def _render_list(self, key: ApiKey, query: Mapping[str, str]) -> bytes | Problem:
        limit, order, after = query.get("limit", str(DEFAULT_LISTED)), query.get("order", "desc"), query.get("after")
        count = int(limit) if limit.isdecimal() and len(limit) < 10 else 0
        if not 1 <= count <= MAX_LISTED:
            return build_invalid(f"limit must be 1 to {MAX_LISTED}", "limit")
        if order not in ("asc", "desc"):
            return build_invalid("order must be asc or desc", "order")
        jobs = [job for job in self._controller.list_jobs() if _can_see(key, job)]
        if order == "asc":
            jobs.reverse()
        if after is not None:
            place = next((number for number, job in enumerate(jobs) if job.id == after), None)
            if place is None:
                return build_invalid("after: there is no such video", "after")
            jobs = jobs[place + 1 :]
        page = jobs[:count]
        return msgspec.json.encode(
            {
                "object": "list",
                "data": [to_row(job) for job in page],
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
                "has_more": len(jobs) > len(page),
            }
        )

    # -- one video ------------------------------------------------------------------------

    async def _answer_job(self, exchange: Exchange, name: str) -> None:
        job = self._find_job(exchange, (*_READ, "DELETE"), name)
        if isinstance(job, Problem):
            await exchange.refuse(job)
        elif exchange.method == "DELETE":
            await self._controller.delete_job(job.id)
            await exchange.answer(msgspec.json.encode({"id": job.id, "object": "video.deleted", "deleted": True}))
        else:
            await self._send_job(exchange, job)

    async def _answer_cancel(self, exchange: Exchange, name: str) -> None:
        job = self._find_job(exchange, ("POST",), name)
        if isinstance(job, Problem):
            await exchange.refuse(job)
            return
        await self._controller.cancel_job(job.id)
        await self._send_job(exchange, self._controller.find_job(job.id) or job)

    async def _answer_content(self, exchange: Exchange, name: str, query: Mapping[str, str]) -> None:
        job = self._find_job(exchange, _READ, name)
        file = job if isinstance(job, Problem) else self._find_file(job, query)
        if isinstance(file, Problem):
            await exchange.refuse(file)
            return
        try:
            await send_file(exchange, *file)
        except FileNotFoundError:
            await exchange.refuse(_build_not_found(name))

    def _find_file(self, job: VideoJob, query: Mapping[str, str]) -> tuple[Path, StoredFile] | Problem:
        kind = _find_requested_kind(job, query)
        if isinstance(kind, Problem):
            return kind
        file = self._controller.artifacts.find_file(job, kind)
        return file or Problem(404, "variant_not_found", f"this video has no {kind}", "variant")

    async def _answer_not_offered(self, exchange: Exchange, feature: str) -> None:
        key = authorize(self._keys, exchange, ("GET", "POST"), "infer")
        text = f"{feature} is not offered: {NOT_OFFERED[feature]}"
        await exchange.refuse(
            key if isinstance(key, Problem) else build_invalid(text, code=RefusalCode.UNSUPPORTED.value)
        )

    def _find_job(self, exchange: Exchange, methods: tuple[str, ...], name: str) -> VideoJob | Problem:
        key = authorize(self._keys, exchange, methods, "infer")
        if isinstance(key, Problem):
            return key
        job = self._controller.find_job(name) if _ID.fullmatch(name) else None
        return job if job is not None and _can_see(key, job) else _build_not_found(name)

    async def _send_job(self, exchange: Exchange, job: VideoJob) -> None:
        headers: list[Header] = []
        if job.open:
            headers = [(b"openai-poll-after-ms", b"%d" % (self._controller.settings.poll_seconds * 1000))]
        await exchange.answer(msgspec.json.encode(to_row(job)), headers=headers)


def _get_job_key(key: ApiKey) -> str:
    """Return `VideoJob.key` for jobs of an API key: its id, or, for the local key, its name.

    The id of the local key changes at each start.
    """
    return key.name if key.name == LOCAL_KEY_NAME else key.id


def _can_see(key: ApiKey, job: VideoJob) -> bool:
    return job.key == _get_job_key(key) or key.allows("admin")


def _parse_body(body: dict[str, Any]) -> VideoBody | Problem:
    parsed = video_schema.VIDEO.parse(body, strict=True)
    return parsed if isinstance(parsed, Problem) else parsed[0]


def _find_requested_kind(job: VideoJob, query: Mapping[str, str]) -> str | Problem:
    """Return the requested kind of file, or the problem if the job has no such file."""
    variant = query.get("variant", "video")
    if variant not in VARIANTS:
        known = ", ".join(VARIANTS)
        return build_invalid(
            f"variant {variant[:40]!r} is not offered, only {known}", "variant", RefusalCode.UNSUPPORTED.value
        )
    if job.state == JobState.FAILED:
        why = "" if job.fault is None else f": {job.fault.message}"
        return Problem(409, "video_failed", f"this video was not made{why}")
    if job.state != JobState.COMPLETED:
        return Problem(
            409, "video_not_completed", f"this video is {to_row(job)['status']}: ask again when it is completed"
        )
    if job.expired:
        return Problem(404, "artifact_expired", f"this video is no longer kept (expires_at {int(job.expires or 0)})")
    return VARIANTS[variant]


def _build_not_found(name: str) -> Problem:
    return Problem(404, "video_not_found", f"there is no video {name[:80]!r}", "video_id")
