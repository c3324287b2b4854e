"""Routes of joining: join tokens, and machines that wait for approval by a person."""

import asyncio
from typing import Annotated, Any

from pydantic import Field

from coordinator.api.body import PLAIN_TEXT_PATTERN, Body
from coordinator.api.errors import ProblemError
from coordinator.api.qr import build_qr_matrix
from coordinator.api.route import Route
from coordinator.http.listen import ListenerAddress
from coordinator.joining.join_approvals import ApprovalLock, ApprovalQueue, DecidedApproval, WrongCode
from coordinator.joining.join_tokens import build_join_command
from coordinator.state.access_admin import AccessAdmin
from router.errors import Problem


class NewTokenBody(Body):
    """Body of a request for a new join token."""

    ttl_seconds: Annotated[float, Field(gt=0, le=30 * 86400)] = 3600.0
    """Lifetime in seconds, at most 30 days."""
    uses: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of machines that may join with the token."""
    name: Annotated[str, Field(max_length=100, pattern=PLAIN_TEXT_PATTERN)] = ""
    """Name in the list of tokens; may be empty."""


class JoinRoutes:
    """Routes of `cluster token` and `cluster approve`. `address` is the coordinator's address for nodes."""

    def __init__(self, admin: AccessAdmin, approvals: ApprovalQueue, address: ListenerAddress) -> None:
        self._admin = admin
        self._approvals = approvals
        self._address = address

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of join tokens and of approvals by code."""
        return (
            Route("GET", "/api/v1/tokens", "admin", self.list_tokens),
            Route("POST", "/api/v1/tokens", "admin", self.create_token),
            Route("DELETE", "/api/v1/tokens/{token}", "admin", self.revoke_token),
            Route("GET", "/api/v1/joins", "admin", self.joins),
            Route("POST", "/api/v1/joins/{code}", "admin", self.approve, (429,)),
            Route("DELETE", "/api/v1/joins/{code}", "admin", self.reject, (429,)),
        )

    async def list_tokens(self) -> dict[str, Any]:
        """List join tokens without their secrets, newest first, with times in Unix seconds. Revoked tokens are omitted.

        Used and expired tokens are listed until they are deleted, at least 7 days after their expiry.
        """
        return self._admin.list_tokens()

    async def create_token(self, body: NewTokenBody) -> dict[str, Any]:
        """Create a join token. Only this response contains its secret, with the join command and its QR code.

        Delete the tokens that expired more than 7 days ago. Raise `StoreError` (503) if the token cannot be stored.
        """
        answer = self._admin.create_token(body.ttl_seconds, body.uses, body.name)
        await self._admin.store.flush()
        join = build_join_command(self._address.build_url(), answer["token"])
        return {**answer, "join": join, "qr": build_qr_matrix(join)}

    async def revoke_token(self, token: str) -> dict[str, Any]:
        """Revoke a join token at once, and return its id. Machines that have joined with the token stay members.

        Raise `ProblemError` 404 if there is no such token. Raise `StoreError` (503) if the change cannot be stored.
        """
        if not self._admin.revoke_token(token):
            raise ProblemError(Problem(404, "token_not_found", f"there is no token {token[:40]!r}"))
        await self._admin.store.flush()
        return {"schema": 1, "id": token}

    async def joins(self) -> dict[str, Any]:
        """List the machines waiting for approval of their code, oldest first. The response contains no codes."""
        return {"schema": 1, "joins": self.build_rows()}

    def build_rows(self) -> list[dict[str, Any]]:
        """Return the machines waiting for approval as rows, oldest first, without their codes."""
        waiting = self._approvals.list_waiting(asyncio.get_running_loop().time())
        return [
            {"name": w.name, "address": w.address, "chip": w.hardware.chip, "replaces": w.replaces} for w in waiting
        ]

    async def approve(self, code: str) -> dict[str, Any]:
        """Approve the waiting machine with this code, and return its name.

        The machine joins within seconds. A repeated request has the same response for five minutes. A machine waits for
        at most 10 minutes. Three wrong codes in a row block all decisions for 60 s. Raise `ProblemError`: 404 if no
        machine shows the code, 429 while decisions are blocked.
        """
        return _build_decision_answer(self._approvals.approve(code, asyncio.get_running_loop().time()))

    async def reject(self, code: str) -> dict[str, Any]:
        """Reject the waiting machine with this code, and return its name.

        Three wrong codes in a row block all decisions for 60 s. Raise `ProblemError`: 404 if no machine shows the code,
        429 while decisions are blocked.
        """
        return _build_decision_answer(self._approvals.reject(code, asyncio.get_running_loop().time()))


def _build_decision_answer(decided: DecidedApproval | WrongCode | ApprovalLock) -> dict[str, Any]:
    if isinstance(decided, DecidedApproval):
        return {"schema": 1, "name": decided.waiting.name, "decision": decided.decision.value}
    if isinstance(decided, ApprovalLock):
        raise ProblemError(
            Problem(
                429,
                "too_many_wrong_codes",
                "too many wrong codes: nothing is decided for a while",
                retry_after=decided.seconds,
            )
        )
    raise ProblemError(Problem(404, "code_not_found", "no waiting machine shows this code: compare both screens"))
