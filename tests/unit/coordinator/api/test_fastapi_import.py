"""A coordinator imports FastAPI without pydantic's old version, and builds FastAPI's own models at their first use."""

import subprocess
import sys

PROGRAM = """
import sys
from coordinator.api.fastapi_import import import_fastapi
import_fastapi()
import coordinator.run
from fastapi.openapi.models import OpenAPI
from pydantic import BaseModel
print([name for name, found in sys.modules.items() if name.startswith("pydantic.v1") and found])
print(OpenAPI.__pydantic_complete__, "defer_build" in BaseModel.model_config)
print(OpenAPI(openapi="3.1.0", info={"title": "", "version": ""}).model_dump(exclude_none=True))
"""


def test_fastapi_is_imported_without_the_old_pydantic_and_its_models_are_built_at_their_first_use() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "False False",
        "{'openapi': '3.1.0', 'info': {'title': '', 'version': ''}}",
    ]
