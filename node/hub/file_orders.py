"""Orders of the coordinator about model files on this node: pull, serve, verify, remove, quantize, cancel.

Rules
- Each order has one end, which the node sends as `ModelOrderEnded` unless the node stops. Without a link, the node
  sends the end on the next link. An end that was sent less than `RESEND_SECONDS` before a new link is sent again on
  that link. At most `MAX_ENDS` ends are kept for this purpose.
- A pull or quantization continues without a link. A repeated order attaches to the running order with the same commit,
  or the same result of a quantization. Such an order can come after a restart of the coordinator. No order attaches to
  a cancelled one.
- Only one order at a time changes the files of a repository.
- A model that is loaded or being loaded is not removed.
- Tokens go to a child on its standard input, and nowhere else.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from msgspec.structs import replace

from host.redaction import hide_secrets
from node.agent.connection import CoordinatorLink
from node.agent.identity import NodeIdentity
from node.agent.links import CoordinatorLinks
from node.hub.child_messages import (
    ChildEnd,
    ChildProgress,
    ClusterFiles,
    DownloadOrder,
    MirrorOrder,
    VerifyOrder,
    build_end,
)
from node.hub.digests import STORE_NAME
from node.hub.errors import ModelFileError
from node.hub.model_places import find_in_model_folders, locate_model, remove_model
from node.hub.order_child import OrderChild
from node.hub.quantization.quantizer import Quantizer
from node.hub.running_order import RunningOrder
from node.hub.serving.addresses import choose_hosts
from node.models.folders import get_hub_folder
from node.settings import ModelSettings
from wire.frames import (
    CancelModelOrder,
    ModelOrderEnded,
    ModelOrderProgress,
    PullModel,
    QuantizeModel,
    RemoveModel,
    ServeModel,
    VerifyModel,
)
from wire.frames.model_files import ModelOrderCode
from wire.identity import is_valid_model
from wire.models.files import SourceKind, find_manifest_fault

MAX_ORDERS = 32
"""Maximum orders in progress. A further order ends at once as `in_use`."""
RESEND_SECONDS = 30.0
"""Age in seconds below which an end is sent again on a new link, because the former link may have been dead already."""
MAX_ENDS = 64
"""Maximum ends that are kept to send them again."""
_DOWNLOADER, _MIRROR, _VERIFIER = "node.hub.downloader", "node.hub.serving.mirror", "node.hub.verifier"

log = structlog.get_logger("node.hub.file_orders")

ModelOrder = PullModel | ServeModel | VerifyModel | RemoveModel | QuantizeModel


@dataclass(frozen=True, slots=True, eq=False)
class _Ending:
    """End of an order, with the link on which it was sent last."""

    frame: ModelOrderEnded
    link: CoordinatorLink | None
    sent_at: float
    """Monotonic time in seconds at which it was sent last."""


class ModelFileOrders:
    """Handler of the coordinator's orders about model files. Call all methods on the loop of the links.

    `state` is the folder of the node's state. `is_loaded(name)` returns whether a model is loaded or being loaded.
    `on_change()` is called when files or digests of a model have changed. `environment` are the variables that locate
    the Hugging Face cache.
    """

    def __init__(
        self,
        settings: ModelSettings,
        identity: NodeIdentity,
        state: Path,
        links: CoordinatorLinks,
        quantizer: Quantizer,
        is_loaded: Callable[[str], bool],
        on_change: Callable[[], None],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self._cluster = ClusterFiles(
            cluster=identity.cluster,
            ca=identity.ca,
            certificate=str(identity.folder / "node.pem"),
            node=identity.node,
            machine=identity.machine,
        )
        self._digests = state / STORE_NAME
        self._links = links
        self._quantizer = quantizer
        self._is_loaded = is_loaded
        self._on_change = on_change
        self._environment = environment
        self._running: set[RunningOrder] = set()
        self._ends = deque[_Ending](maxlen=MAX_ENDS)
        self._stopping = False

    def handle(self, order: ModelOrder | CancelModelOrder, link: CoordinatorLink) -> None:
        """Start an order that came over `link`, attach it to a running order, or cancel an order.

        The end is sent later; for an order that cannot be performed, at once. An order with a number in progress and
        the cancel of an unknown order are ignored.
        """
        running = self._find(order.order)
        if isinstance(order, CancelModelOrder):
            if running is not None:
                running.cancel()
            return
        if running is not None:
            return
        try:
            self._begin(order, link)
        except ModelFileError as error:
            self._send_end(order.order, build_end(error.code, error.message))

    def is_working(self) -> bool:
        """Return whether an order is in progress."""
        return bool(self._running)

    def resend_ends(self) -> None:
        """Send the ends that the coordinator may have missed again, on the current link. Call it for each new link."""
        now, link = asyncio.get_running_loop().time(), self._links.current
        for ending in tuple(self._ends):
            missed = ending.link is None or (ending.link is not link and now - ending.sent_at < RESEND_SECONDS)
            if missed and link is not None:
                self._ends.remove(ending)
                self._send_frame(ending.frame)

    async def stop(self) -> None:
        """Cancel all orders, wait for their ends without sending them, and refuse further orders.

        A removal is not cancelled: it completes first. Processes that do not end are killed
        (`order_child.TERMINATE_TIMEOUT_SECONDS`).
        """
        self._stopping = True
        stopped = tuple(self._running)
        for running in stopped:
            running.cancel()
        for running in stopped:
            await running.wait_end()

    # orders

    def _find(self, number: int) -> RunningOrder | None:
        return next((running for running in self._running if number in running.numbers), None)

    def _begin(self, order: ModelOrder, link: CoordinatorLink) -> None:
        """Begin an order. Raise `ModelFileError` if it cannot be performed."""
        if self._stopping or len(self._running) >= MAX_ORDERS:
            why = "the node stops" if self._stopping else f"{MAX_ORDERS} orders are in progress on this node"
            raise ModelFileError(ModelOrderCode.IN_USE, f"{why}: try again later")
        match order:
            case PullModel():
                self._start_pull(order, link)
            case ServeModel():
                self._start_mirror(order, link)
            case VerifyModel():
                self._check_name(order.model)
                self._start(RunningOrder(order.order, order.model), self._verify)
            case RemoveModel():
                self._check_name(order.model)
                self._check_unused(order.model)
                self._start(RunningOrder(order.order, order.model), self._remove)
            case QuantizeModel():
                self._check_name(order.model)
                self._start_quantization(order)

    def _check_name(self, name: str) -> None:
        if not is_valid_model(name):
            raise ModelFileError(ModelOrderCode.INVALID, f"{name[:200]!r} is not the name of a model")

    def _check_unused(self, name: str) -> None:
        """Raise `ModelFileError` if a model is loaded, or another order uses its files."""
        if self._is_loaded(name):
            raise ModelFileError(ModelOrderCode.IN_USE, f"{name} is loaded: unload it first")
        if any(running.key == name for running in self._running):
            raise ModelFileError(ModelOrderCode.IN_USE, f"another order works on {name}: cancel it or wait for its end")

    def _start_pull(self, order: PullModel, link: CoordinatorLink) -> None:
        manifest = order.manifest
        fault = find_manifest_fault(manifest)
        if not self._settings.use_huggingface_cache:
            text = "this node does not serve its Hugging Face cache: set models.use_huggingface_cache = true there"
            raise ModelFileError(ModelOrderCode.FAILED, text)
        if fault:
            raise ModelFileError(ModelOrderCode.INVALID, fault)
        pulls = (pull for pull in self._running if pull.commit and not pull.cancelled)
        running = next((pull for pull in pulls if pull.key == manifest.repo), None)
        if running is not None and running.commit == manifest.commit:
            running.numbers.add(order.order)
            return
        if running is not None:
            raise ModelFileError(
                ModelOrderCode.IN_USE, f"this node pulls {manifest.repo} at commit {running.commit}: cancel that pull"
            )
        message = DownloadOrder(
            manifest=manifest,
            sources=order.sources,
            hub=str(get_hub_folder(self._environment)),
            digests=str(self._digests),
            cluster=replace(self._cluster, coordinator=link.address),
        )
        log.info("pull", model=manifest.repo, commit=manifest.commit, sources=[source.kind for source in order.sources])
        from_mirror = any(source.kind != SourceKind.HUB for source in order.sources)
        running = RunningOrder(order.order, manifest.repo, manifest.commit, from_mirror=from_mirror)
        self._start(running, lambda running: self._run_pull(running, message))

    def _start_mirror(self, order: ServeModel, link: CoordinatorLink) -> None:
        fault = find_manifest_fault(order.manifest)
        if fault or not order.token:
            raise ModelFileError(ModelOrderCode.INVALID, fault or "a mirror needs a token")
        message = MirrorOrder(
            manifest=order.manifest,
            hub=str(get_hub_folder(self._environment)),
            token=order.token,
            cluster=replace(self._cluster, coordinator=link.address),
            hosts=choose_hosts(link.local_address),
            idle_seconds=order.idle,
            relay=order.relay,
        )
        self._start_child(RunningOrder(order.order, order.manifest.repo), _MIRROR, message)

    def _start_quantization(self, order: QuantizeModel) -> None:
        result = (order.name, order.bits)
        running = next(
            (
                open_order
                for open_order in self._running
                if open_order.key == order.model and open_order.result == result and not open_order.cancelled
            ),
            None,
        )
        if running is not None:
            running.numbers.add(order.order)
            return
        ending = [open_order for open_order in self._running if open_order.result and open_order.cancelled]
        log.info("quantize", model=order.model, bits=order.bits, name=order.name)
        self._start(
            RunningOrder(order.order, order.model, result=result),
            lambda running: self._run_quantization(running, order, ending),
        )

    async def _run_quantization(
        self, running: RunningOrder, order: QuantizeModel, ending: list[RunningOrder]
    ) -> ChildEnd:
        for cancelled in ending:
            await cancelled.wait_end()
        return await self._quantizer.run(
            order, running.run_child, lambda progress: self._send_progress(running, progress)
        )

    async def _run_pull(self, running: RunningOrder, message: DownloadOrder) -> ChildEnd:
        """Download a model.

        Raise `ModelFileError` if a model folder has a model of this name, which is served instead of that of the cache.
        """
        place = await asyncio.to_thread(find_in_model_folders, self._settings, running.key)
        if place is not None:
            text = (
                f"this node serves {running.key} from {place.folder}, and would not use a copy in the Hugging Face "
                "cache: remove that model, then pull again"
            )
            raise ModelFileError(ModelOrderCode.FAILED, text)
        return await self._run_child(running, _DOWNLOADER, message)

    async def _verify(self, running: RunningOrder) -> ChildEnd:
        place = await asyncio.to_thread(locate_model, self._settings, running.key, self._environment)
        message = VerifyOrder(folder=str(place.folder), digests=str(self._digests))
        return await self._run_child(running, _VERIFIER, message)

    async def _remove(self, running: RunningOrder) -> ChildEnd:
        place = await asyncio.to_thread(locate_model, self._settings, running.key, self._environment)
        freed = await asyncio.to_thread(remove_model, place)
        log.info("model removed", model=running.key, folder=str(place.folder), freed=freed)
        return ChildEnd(code=ModelOrderCode.COMPLETED, freed=freed)

    # lifecycle of an order

    def _start_child(self, running: RunningOrder, module: str, message: DownloadOrder | MirrorOrder) -> None:
        self._start(running, lambda running: self._run_child(running, module, message))

    def _start(
        self, running: RunningOrder, work: Callable[[RunningOrder], Coroutine[object, object, ChildEnd]]
    ) -> None:
        self._running.add(running)
        running.start(self._run(running, work(running)))

    async def _run(self, running: RunningOrder, work: Coroutine[object, object, ChildEnd]) -> None:
        """Perform an order and send its end, also after an unexpected error."""
        end = build_end(ModelOrderCode.FAILED, "the order failed: see the node's log")
        try:
            end = await work
        except ModelFileError as error:
            end = build_end(error.code, error.message)
        except OSError as error:
            why = error.strerror or (error.args[0] if error.args else type(error).__name__)
            end = build_end(ModelOrderCode.FAILED, f"the files of {running.key} cannot be changed: {why}")
        except Exception:
            log.exception("model order")
        finally:
            self._running.discard(running)
            log.info("model order ended", model=running.key, code=end.code, message=end.message)
            if end.code == ModelOrderCode.COMPLETED:
                self._on_change()
            # Without an end, the coordinator sends the order again when the node is back.
            for number in () if self._stopping else sorted(running.numbers):
                self._send_end(number, end)

    async def _run_child(
        self, running: RunningOrder, module: str, message: DownloadOrder | MirrorOrder | VerifyOrder
    ) -> ChildEnd:
        child = OrderChild(module, message, lambda progress: self._send_progress(running, progress))
        return await running.run_child(child)

    def _send_progress(self, running: RunningOrder, progress: ChildProgress) -> None:
        for number in running.numbers:
            self._links.send(
                ModelOrderProgress(
                    order=number,
                    phase=progress.phase,
                    done=progress.done,
                    total=progress.total,
                    speed=progress.speed,
                    source=progress.source,
                    addresses=progress.addresses,
                    fetched=progress.fetched,
                    message=hide_secrets(progress.message),
                    from_mirror=running.from_mirror,
                )
            )

    def _send_end(self, number: int, end: ChildEnd) -> None:
        frame = ModelOrderEnded(
            order=number,
            code=end.code,
            message=hide_secrets(end.message),
            content=end.content,
            fetched=end.fetched,
            freed=end.freed,
            retry_after=end.retry_after,
            stored=end.stored,
            peak=end.peak,
        )
        self._send_frame(frame)

    def _send_frame(self, frame: ModelOrderEnded) -> None:
        """Send an end if there is a link. Keep the end, which the next link may need (`resend_ends`)."""
        self._ends.append(_Ending(frame, self._links.current, asyncio.get_running_loop().time()))
        self._links.send(frame)
