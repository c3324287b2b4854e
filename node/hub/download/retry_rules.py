"""Compute the waits of an HTTP client after failures, and check the range of a response. Pure."""

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

MAX_WAIT_SECONDS = 300.0
"""Maximum seconds for which a source may limit the rate of requests: by one response, or in total without progress.

Above that the source is lost.
"""
DEFAULT_WAIT_SECONDS = 5.0
"""Wait in seconds after a refusal that names no time."""
MAX_NAMED_WAIT_SECONDS = 30 * 24 * 3600.0
"""Maximum wait in seconds that a response can demand; longer waits are cut."""
FIRST_BACKOFF_SECONDS = 0.25
"""Maximum wait in seconds after the first failure; each further failure doubles the wait."""
MAX_DOUBLINGS = 5
"""Maximum number of doublings: no wait after a failure is longer than 8 s."""
_RATE_LIMIT = re.compile(r"r\s*=\s*(\d{1,12})\s*;\s*t\s*=\s*(\d{1,12})")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")


def compute_retry_after(headers: Mapping[str, str], now: float) -> float:
    """Return the seconds until the next try, by `Retry-After` (seconds or a date), else by `RateLimit`.

    `headers` has names in lower case, `now` is in Unix seconds. Without a readable time, return `DEFAULT_WAIT_SECONDS`.
    The maximum is `MAX_NAMED_WAIT_SECONDS`.
    """
    value = headers.get("retry-after", "").strip()
    match = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    if value:
        seconds = float(value) if value.isdecimal() else _compute_seconds_until(value, now)
    else:
        seconds = float(match[2]) if match is not None else DEFAULT_WAIT_SECONDS
    return min(MAX_NAMED_WAIT_SECONDS, max(0.0, seconds))


def _compute_seconds_until(date: str, now: float) -> float:
    """Return the seconds until an HTTP date; `DEFAULT_WAIT_SECONDS` for any other text."""
    try:
        parsed = parsedate_to_datetime(date)
    except ValueError:
        return DEFAULT_WAIT_SECONDS
    return parsed.replace(tzinfo=parsed.tzinfo or UTC).timestamp() - now


def compute_backoff(failures: int, draw: float) -> float:
    """Return the seconds to wait after a failure. `failures` is the number of earlier failures in a row.

    `draw` is random, from 0 (half of the maximum wait) to 1 (the maximum wait).
    """
    return FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, MAX_DOUBLINGS) * (0.5 + draw / 2)


def find_range_fault(content_range: str, start: int, end: int, size: int) -> str:
    """Return why a `Content-Range` does not match a request for the bytes from `start` to before `end`; empty if valid.

    A valid range begins at `start` and ends at `end` or before. Its total is `*` or `size`, the size of the file in
    the manifest.
    """
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    if match is None:
        return f"the range {content_range[:80]!r} is malformed"
    first, last = int(match[1]), int(match[2])
    if match[3] not in ("*", str(size)):
        return f"the file has {match[3]} bytes there, and {size} in the manifest"
    if first != start or not first <= last < end:
        return f"bytes {first} to {last} came instead of {start} to {end - 1}"
    return ""
