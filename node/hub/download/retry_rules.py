"""Waits of an HTTP client after a refusal, and the check of the range of an answer. Pure: `now` is Unix seconds."""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

MAX_WAIT_SECONDS = 300.0
"""Maximum seconds for which a download waits for a rate limit. A longer limit ends the order."""
DEFAULT_WAIT_SECONDS = 5.0
"""Wait in seconds after a refusal that names no time."""
MIN_BACKOFF_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 8.0
_RATE_LIMIT = re.compile(r"r\s*=\s*(\d{1,12})\s*;\s*t\s*=\s*(\d{1,12})")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")


def compute_retry_after(headers: Mapping[str, str], now: float) -> float:
    """Return the seconds until the next try, by `Retry-After` (seconds or a date) or `RateLimit`.

    `headers` has names in lower case. The default is DEFAULT_WAIT_SECONDS.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:12])
    if value:
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - now)
        except (ValueError, OverflowError, OSError):
            return DEFAULT_WAIT_SECONDS
    match = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(match[2]) if match is not None else DEFAULT_WAIT_SECONDS


def compute_backoff(failures: int, draw: float) -> float:
    """Return the seconds to wait after a number of failures in a row. `draw` is random, from 0 to 1."""
    return min(MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS * 2.0 ** min(failures, 16)) * (0.5 + draw / 2)


def find_range_fault(content_range: str, start: int, end: int, size: int) -> str:
    """Return why a `Content-Range` does not answer a request for the bytes `start` to `end` (without `end`).

    `size` is the size of the file in the manifest. Return an empty text for a range that begins at `start`.
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
