"""Bodies of the control plane: read as strictly as on the routes that generate, unknown fields refused."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from router.dialects.strict_json import read_object
from router.problems import Problem

PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""A text that moves no terminal's cursor."""


class Body(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(extra="forbid")


class StrictRequest(Request):
    """A request whose body two readers cannot understand differently."""

    async def json(self) -> Any:
        """Give the JSON object, or the 400."""
        found = read_object(await self.body())
        if isinstance(found, Problem):
            raise HTTPException(found.status, found.message)
        return found


class StrictRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        plain = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await plain(StrictRequest(request.scope, request.receive))

        return handle
