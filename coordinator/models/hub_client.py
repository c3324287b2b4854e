"""Queries to the hub, each in a child process `node.hub.query`, because only the node imports the hub's library."""

import asyncio
import os
import stat
import sys

import msgspec
import structlog

from coordinator.models.settings import HubSettings
from host.private_files import resolve_home
from wire.frames import ModelOrderCode
from wire.models.hub_query import QUERY_TIMEOUT_SECONDS, HubAnswer, HubQuery, HubRefusal

CHILD_TIMEOUT_SECONDS = QUERY_TIMEOUT_SECONDS + 15.0
"""Maximum run time of a child process, in seconds. The child itself gives up after `QUERY_TIMEOUT_SECONDS`."""
MAX_QUERIES = 2
"""Maximum concurrent queries; further queries wait."""
MAX_TOKEN_BYTES = 4096

log = structlog.get_logger("coordinator.models.hub_client")


class TokenFileError(Exception):
    """Raised if the file with the token of the hub cannot be used. The text has the reason."""


class HubClient:
    """Client of the hub in `settings`. `program` is the command line of the child process for a query."""

    def __init__(
        self, settings: HubSettings, program: tuple[str, ...] = (sys.executable, "-P", "-m", "node.hub.query")
    ) -> None:
        self.endpoint = settings.endpoint.rstrip("/")
        self._token_file = settings.token_file
        self._program = program
        self._free = asyncio.Semaphore(MAX_QUERIES)

    def read_token(self) -> str:
        """Return the token of the hub; empty if none is configured. Raise `TokenFileError` for an unusable file."""
        if not self._token_file:
            return ""
        path = resolve_home(self._token_file)
        try:
            with path.open("rb") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise TokenFileError(f"hub.token_file {path} is readable by other users: run chmod 600 {path}")
                token = file.read(MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
        except OSError as error:
            raise TokenFileError(f"hub.token_file {path} cannot be read: {error.strerror}") from None
        if not token.isprintable() or not token.isascii() or " " in token:
            raise TokenFileError(f"hub.token_file {path} does not contain a token in one line")
        return token

    async def query(self, repo: str, revision: str) -> HubAnswer | HubRefusal:
        """Query the hub for the files and the metadata of a repository. An empty `revision` selects `main`.

        Return the answer, or a refusal if the hub refuses. A refusal is also returned if the token file cannot be used,
        if the child cannot be started or fails, or after `CHILD_TIMEOUT_SECONDS`. The wait for one of `MAX_QUERIES`
        places is not part of that time. A cancellation kills the child.
        """
        try:
            token = self.read_token()
        except TokenFileError as error:
            return HubRefusal(code=ModelOrderCode.INVALID, message=str(error))
        query = HubQuery(endpoint=self.endpoint, repo=repo, token=token, revision=revision)
        async with self._free:
            return await self._run_child(query)

    async def _run_child(self, query: HubQuery) -> HubAnswer | HubRefusal:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            text = f"the query of the hub cannot be started ({error.strerror or error}): try again"
            log.warning("hub query not started", repo=query.repo, reason=str(error))
            return HubRefusal(code=ModelOrderCode.FAILED, message=text)
        try:
            async with asyncio.timeout(CHILD_TIMEOUT_SECONDS):
                output, errors = await process.communicate(msgspec.json.encode(query))
        except TimeoutError:
            text = f"the hub did not answer within {QUERY_TIMEOUT_SECONDS:.0f} s: try again"
            return HubRefusal(code=ModelOrderCode.SOURCE_LOST, message=text)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return msgspec.json.decode(output, type=HubAnswer | HubRefusal)
        except msgspec.DecodeError:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            reason = lines[-1][:300] if lines else f"exit code {process.returncode}"
            log.warning("hub query failed", repo=query.repo, reason=reason)
            hint = "install Macpool with its node part on the coordinator's Mac"
            return HubRefusal(code=ModelOrderCode.FAILED, message=f"the query of the hub failed: {reason}; {hint}")
