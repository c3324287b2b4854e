"""Child process that looks up a repository on the hub: `python -m node.hub.query`.

The process reads one JSON document (`HubQuery`) from the standard input, and writes a `HubAnswer` or a `HubRefusal` to
the standard output. Logs and texts of libraries go to the standard error. The process does not write to the Hugging
Face cache. Only this module imports the library of the hub, which reads the environment at import.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec

from node.hub.child_messages import ClusterFiles
from node.hub.download.connection_errors import describe_connection_error
from node.hub.download.retry_rules import compute_backoff, compute_retry_after
from node.hub.download.source_client import SourceClient
from node.hub.download.source_errors import SourceError, SourceLimited, SourceRefusal
from node.hub.errors import ModelFileError, describe_refusal
from node.hub.prediction.file_selection import is_weight_file, select_files
from node.hub.prediction.predict import predict_model
from node.models.embedding_files import DENSE_FILES, LENGTH, MODULES, POOLING, PROMPTS
from node.models.rerank_files import LOGIT_SCORE
from node.models.weight_files import MAX_HEADER_BYTES
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind, find_manifest_fault, is_valid_repo
from wire.models.hub_query import HubAnswer, HubQuery, HubRefusal, SkippedFile

REQUEST_TIMEOUT_SECONDS = 20.0
PARALLEL_REQUESTS = 8
MAX_ATTEMPTS = 5
"""Maximum tries of one request to the hub."""
LIBRARY_ENVIRONMENT = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment variables for the library `huggingface_hub` in the process of a query."""
MAX_SMALL_FILE_BYTES = 32 * 1024 * 1024
"""Maximum bytes of a JSON or template file that is read for the prediction; a larger one is not read."""
FIRST_HEADER_BYTES = 128 * 1024
"""Bytes of a weight file that are read at first: the headers of most files are shorter."""
_READ_FIRST = frozenset(
    {
        "config.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "chat_template.jinja",
        LOGIT_SCORE,
        MODULES,
        POOLING,
        PROMPTS,
        LENGTH,
        *(path for path in DENSE_FILES if path.endswith(".json")),
    }
)
"""Files that decide the kind of a model, its layers, and its vectors or scores."""

T = TypeVar("T")


class RepositoryQuery:
    """One query of the hub. A retry whose wait would extend beyond `deadline` (monotonic seconds) is not made."""

    def __init__(self, query: HubQuery, deadline: float) -> None:
        self._query = query
        self._deadline = deadline
        self._clock = threading.Event()
        self._subject = f"{query.repo} at revision {query.revision}" if query.revision else query.repo

    def run(self) -> HubAnswer:
        """Query the repository. Return its manifest, the predicted properties of its model, and the files not to pull.

        Raise `ModelFileError` if the repository cannot be pulled or the hub cannot be reached. Raise `OSError` for
        faults of this machine. Raise `ValueError` if the endpoint of the query is no address, or the weights of a Dense
        layer are invalid.
        """
        if not is_valid_repo(self._query.repo):
            raise ModelFileError(
                ModelOrderCode.INVALID,
                f"{self._query.repo[:200]!r} is not the name of a repository: use publisher/name",
            )
        info = self._retry(self._fetch_info)
        files = [_build_file(sibling) for sibling in info.siblings or ()]
        needed, skipped = select_files(files)
        manifest = ModelManifest(self._query.repo, str(info.sha), needed, self._query.revision)
        fault = find_manifest_fault(manifest) if needed else ""
        if fault:
            raise ModelFileError(ModelOrderCode.INVALID, fault)
        with tempfile.TemporaryDirectory(prefix="macpool-query-") as folder:
            self._fetch_metadata(manifest, Path(folder))
            model = predict_model(self._query.repo, Path(folder), manifest, [file.path for file in files])
        return HubAnswer(
            manifest=manifest, model=model, skipped=tuple(SkippedFile(file.path, file.size) for file in skipped)
        )

    def _fetch_info(self) -> Any:
        """Request the metadata of the repository by the library of the hub.

        Raise `ModelFileError` if the name is invalid, and the errors of `_convert_refusal` after a refusal.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api: Any = HfApi(endpoint=self._query.endpoint.rstrip("/"), token=self._query.token or False)
        try:
            return api.model_info(
                self._query.repo,
                revision=self._query.revision or None,
                files_metadata=True,
                timeout=REQUEST_TIMEOUT_SECONDS,
            )
        except HfHubHTTPError as error:
            raise self._convert_refusal(error.response) from None
        except HFValidationError:
            raise ModelFileError(ModelOrderCode.INVALID, f"{self._subject} is not a valid name") from None

    def _convert_refusal(self, response: Any) -> Exception:
        """Return the error for an HTTP answer that is not a success."""
        status, headers = int(response.status_code), response.headers
        if status == 429:
            return SourceLimited("the hub limits the rate of requests", compute_retry_after(headers, time.time()))
        refusal = describe_refusal(
            status, headers.get("x-error-code", ""), self._subject, has_token=bool(self._query.token)
        )
        return refusal or SourceError(f"the hub answered {status}")

    def _fetch_metadata(self, manifest: ModelManifest, folder: Path) -> None:
        """Write the small files that the prediction reads, and the weights as sparse files, into a folder."""
        client = SourceClient(
            ModelSource(SourceKind.HUB, self._query.endpoint, self._query.token),
            ClusterFiles(),
            connections=PARALLEL_REQUESTS,
        )

        def fetch(file: ModelFile) -> None:
            target = folder / file.path
            target.parent.mkdir(exist_ok=True)
            if _has_header(file):
                content = self._read_header(client, manifest, file)
            else:
                content = self._read(client, manifest, file, file.size)
            target.write_bytes(content)
            os.truncate(target, file.size)

        small = [file for file in manifest.files if file.path in _READ_FIRST and file.size <= MAX_SMALL_FILE_BYTES]
        try:
            _run_parallel(fetch, small)
            _run_parallel(fetch, [file for file in manifest.files if _has_header(file)])
        finally:
            client.close()

    def _read_header(self, client: SourceClient, manifest: ModelManifest, file: ModelFile) -> bytes:
        """Return the first bytes of a weight file, with its complete header unless the header is invalid."""
        begin = self._read(client, manifest, file, min(file.size, FIRST_HEADER_BYTES))
        wanted = 8 + int.from_bytes(begin[:8], "little")
        if len(begin) >= wanted or wanted > min(file.size, MAX_HEADER_BYTES):
            return begin
        return self._read(client, manifest, file, wanted)

    def _read(self, client: SourceClient, manifest: ModelManifest, file: ModelFile, size: int) -> bytes:
        """Return the first `size` bytes of a file. Repeat the request and raise as `_retry` does."""

        def read() -> bytes:
            with client.open_range(manifest, file, 0, size) as blocks:
                content = b"".join(blocks)
            if len(content) < size:
                raise SourceError(f"the hub ended {file.path} early")
            return content

        return self._retry(read) if size else b""

    def _retry(self, request: Callable[[], T]) -> T:
        """Repeat a request after faults that can pass.

        Raise `ModelFileError` after a permanent fault, after `MAX_ATTEMPTS` requests, or if the next wait extends
        beyond the deadline.
        """
        for attempt in range(MAX_ATTEMPTS):
            try:
                return request()
            except SourceRefusal as error:
                raise ModelFileError(error.code, str(error)) from None
            except SourceLimited as error:
                if time.monotonic() + error.seconds > self._deadline or attempt == MAX_ATTEMPTS - 1:
                    text = f"{error} for {error.seconds:.0f} s: try again after that time, or set a token"
                    raise ModelFileError(ModelOrderCode.RATE_LIMITED, text, error.seconds) from None
                self._clock.wait(error.seconds)
            except (SourceError, httpx2.HTTPError) as error:
                reason = str(error) if isinstance(error, SourceError) else describe_connection_error(error)
                wait = compute_backoff(attempt, 1.0)
                if time.monotonic() + wait > self._deadline or attempt == MAX_ATTEMPTS - 1:
                    raise ModelFileError(
                        ModelOrderCode.SOURCE_LOST, f"the hub cannot be reached for {self._subject}: {reason}"
                    ) from None
                self._clock.wait(wait)
        raise AssertionError  # the last attempt returns or raises


def _has_header(file: ModelFile) -> bool:
    """Return whether only the header of a file is read: that of weights, or of a Dense layer."""
    return is_weight_file(file.path) or (file.path in DENSE_FILES and file.path.endswith(".safetensors"))


def _run_parallel(work: Callable[[ModelFile], None], files: Iterable[ModelFile]) -> None:
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as threads:
        for _ in threads.map(work, files):
            pass


def _build_file(sibling: Any) -> ModelFile:
    """Return a file of a manifest from the library's description."""
    lfs = sibling.lfs
    return ModelFile(
        str(sibling.rfilename),
        int((lfs.size if lfs is not None else sibling.size) or 0),
        str(lfs.sha256) if lfs is not None else "",
        str(sibling.blob_id or "") if lfs is None else "",
    )


def answer_query(query: HubQuery) -> HubAnswer | HubRefusal:
    """Query the hub for a repository. Return the answer; a refusal after a failure or `HubQuery.timeout_seconds`.

    After the timeout, the process must end, because the thread of the query still runs.
    """
    answers = list[HubAnswer | HubRefusal]()

    def run() -> None:
        try:
            answers.append(RepositoryQuery(query, time.monotonic() + query.timeout_seconds).run())
        except ModelFileError as error:
            answers.append(HubRefusal(code=error.code, message=error.message, retry_after=error.retry_after))
        except Exception as error:
            text = f"the metadata of {query.repo} cannot be read: {type(error).__name__}"
            answers.append(HubRefusal(code=ModelOrderCode.FAILED, message=text))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(query.timeout_seconds)
    text = f"{query.repo}: the hub did not answer within {query.timeout_seconds:.0f} s: try again"
    return answers[0] if answers else HubRefusal(code=ModelOrderCode.SOURCE_LOST, message=text)


def main() -> None:
    """Read a query from standard input, write the answer to standard output, and end the process.

    The answer is a `HubRefusal` for an unreadable query, after a failure, and after the timeout of the query. The exit
    code is 0.
    """
    os.environ.update(LIBRARY_ENVIRONMENT)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        query = msgspec.json.decode(sys.stdin.buffer.read(), type=HubQuery)
        answer = answer_query(query)
    except msgspec.DecodeError:
        answer = HubRefusal(code=ModelOrderCode.INVALID, message="the query cannot be read")
    output.write(msgspec.json.encode(answer) + b"\n")
    output.flush()
    os._exit(0)  # a request may still be in progress


if __name__ == "__main__":
    main()
