"""Check periodically, in a thread, whether this node has video packages and an environment to make videos."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from msgspec.structs import replace

from host.private_files import resolve_home
from node.models.folders import get_hub_folder
from node.settings import NodeSettings
from node.video import environment, packages
from node.video.packages import Package

CHECK_INTERVAL_SECONDS = 30.0
"""Seconds between two checks."""

log = structlog.get_logger("node.video")


@dataclass(frozen=True, slots=True)
class VideoCheck:
    """Result of one check of this node's video packages and video environment."""

    packages: Mapping[str, Package]
    """Video packages by name, including those that cannot be used."""
    missing: str = ""
    """Reason why the packages cannot run on this Mac; empty if they can."""


NOTHING = VideoCheck({}, "this node is still searching for video packages")
"""Result before the first check."""


class VideoCapability:
    """Periodic check of this node's video packages and video environment, with its latest result.

    `state` is the state folder. `changed()` is called on the event loop when a result differs from the previous one.
    `environ` are the variables that locate the Hugging Face cache.
    """

    def __init__(
        self,
        settings: NodeSettings,
        state: Path,
        changed: Callable[[], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self.environments = get_environments_folder(settings, state)
        """Folder of the video workers' environments."""
        self._hub = get_hub_folder(environ) if settings.models.use_huggingface_cache else None
        self._result = NOTHING
        self._task: asyncio.Task[None] | None = None
        self.checked = asyncio.Event()
        """Set once the first check is done, or if no check will run."""
        self._changed = changed

    @property
    def enabled(self) -> bool:
        """Whether video is enabled in the settings."""
        return self._settings.worker.enabled

    @property
    def packages(self) -> Mapping[str, Package]:
        """Video packages of the latest check by name, including those that cannot be used."""
        return self._result.packages

    @property
    def python(self) -> Path:
        """Path of the Python of the video worker's environment, which may not be installed yet."""
        return environment.get_interpreter(
            environment.get_environment_path(self.environments, environment.find_requirement_files())
        )

    @property
    def unready(self) -> str:
        """Reason why this node cannot make videos; empty if it can."""
        if not self.enabled:
            return "video is switched off on this node (worker.enabled)"
        if self._result.missing:
            return self._result.missing
        if not any(not package.described.cause for package in self._result.packages.values()):
            return "this node has no usable video package: download one, or add its folder to models.folders"
        return ""

    def start(self) -> None:
        """Start the periodic check if video is enabled, without waiting for the first result."""
        if self.enabled:
            self._task = asyncio.create_task(self._check_periodically())
        else:
            self.checked.set()

    def set_unready(self, cause: str) -> None:
        """Replace the result of the check by the reason `cause` why this node cannot make videos, and set `checked`.

        `packages` is then empty. The periodic check must not run, because it would replace `cause`.
        """
        self._result = VideoCheck({}, cause)
        self.checked.set()

    async def stop(self) -> None:
        """Stop the periodic check."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _check_periodically(self) -> None:
        while True:
            result = await asyncio.to_thread(self._check)
            if result != self._result:
                self._result = result
                log.info("video", packages=sorted(result.packages), unready=self.unready)
                self._changed()
            self.checked.set()
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)

    def _check(self) -> VideoCheck:
        try:
            return self._find_packages()
        except Exception as error:  # a lost network disk, or unknown files, which may raise any error
            return VideoCheck({}, f"packages and environment cannot be checked: {error}")

    def _find_packages(self) -> VideoCheck:
        engine = environment.read_engine_version(environment.find_requirement_files())
        missing = environment.describe_missing(self.environments)
        by_name = packages.find_packages(self._settings.models.folders, self._hub)
        return VideoCheck(
            {
                name: Package(package.folder, replace(package.described, engine="" if missing else engine))
                for name, package in by_name.items()
            },
            missing,
        )


def get_environments_folder(settings: NodeSettings, state: Path) -> Path:
    """Return the folder of the video workers' environments: `worker.environments`, or else a folder below `state`."""
    wanted = settings.worker.environments
    return resolve_home(wanted) if wanted else state / "node" / "video" / "environments"
