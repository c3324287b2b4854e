"""Quantizations of models on nodes: orders, their progress and their ends, on the coordinator's loop.

The node decides and does the work. A quantization continues there even if the link is lost or the coordinator stops.
After a restart of the coordinator, the node reports progress under the same order number. Starts and ends are stored in
STATE/quantizations.json.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec
import structlog

from host.private_files import write_private
from wire.frames import CancelModelOrder, Frame, ModelOrderCode, ModelOrderEnded, ModelOrderProgress, QuantizeModel
from wire.identity import NodeId

MAX_OPEN = 16
"""Maximum quantizations that have not ended."""
MAX_ENDED = 50
"""Maximum ended quantizations. The oldest ones above it are deleted when another quantization starts."""
RETURN_TIMEOUT_SECONDS = 30.0
"""Seconds after a node's new link within which the node must report a quantization that continues there."""

log = structlog.get_logger("coordinator.model_tools.quantizations")


class QuantizationStage(StrEnum):
    """Stage of a quantization."""

    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TooManyQuantizationsError(Exception):
    """Raised if `MAX_OPEN` quantizations are open. The text has the limit and the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRecord:
    """Quantization of a model on a node. Times are in Unix seconds, sizes in bytes."""

    id: str
    node: NodeId
    order: QuantizeModel
    """Order that was sent to the node."""
    started: float
    actor: str = ""
    """Actor that started the quantization, as in the audit log (`AuditRow.actor`)."""
    ended: float | None = None
    """Unix time in seconds of the end; None while the quantization runs."""
    stage: QuantizationStage = QuantizationStage.RUNNING
    phase: str = ""
    """Phase of the order, as reported by the node; empty before the first report."""
    done: int = 0
    """Bytes of quantized weights so far."""
    total: int = 0
    """Bytes of quantized weights at the end; 0 if unknown."""
    speed: float = 0.0
    """Bytes of quantized weights per second, as reported by the node; 0 if unknown."""
    code: str = ""
    """`ModelOrderCode` of the end; empty while the quantization runs."""
    message: str = ""
    """Reason of a failure, for a person; empty unless the quantization failed."""
    stored: int = 0
    """Bytes of the weights of the quantized model; 0 unless the quantization succeeded."""
    peak: int = 0
    """Maximum memory footprint, in bytes, of the process that quantized; 0 if unknown."""
    is_linked: bool = True
    """Whether the node is currently linked."""

    def to_row(self, get_name: Callable[[NodeId], str]) -> dict[str, object]:
        """Return the quantization as a row of the API. `get_name` returns the display name of a node."""
        left = (self.total - self.done) / self.speed if self.speed > 0 else None
        is_running = self.stage is QuantizationStage.RUNNING
        return {
            "id": self.id,
            "node": {"id": self.node, "name": get_name(self.node), "linked": self.is_linked},
            "model": self.order.model,
            "bits": self.order.bits,
            "name": self.order.name,
            "state": str(self.stage),
            "phase": self.phase if is_running else "",
            "done": self.done,
            "total": self.total,
            "speed": self.speed if is_running else 0.0,
            "seconds_left": round(left, 1) if left is not None and is_running else None,
            "code": self.code,
            "message": self.message,
            "stored": self.stored,
            "peak": self.peak,
            "started": self.started,
            "ended": self.ended,
            "actor": self.actor,
        }


class Quantizations:
    """All quantizations, oldest first, stored in the state folder `state`.

    A file that cannot be read counts as empty. A failure to read or write the file is logged. `send` sends a frame to a
    node and returns False if the node is not linked. `number` returns the number of the next order. `wall` returns Unix
    seconds.
    """

    def __init__(
        self,
        state: Path,
        send: Callable[[NodeId, Frame], bool],
        number: Callable[[], int],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._file = state / "quantizations.json"
        self._send = send
        self._number = number
        self._wall = wall
        self._all: dict[str, QuantizationRecord] = {
            record.id: replace(record, is_linked=False) for record in self._load()
        }
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._cancelled = set[str]()
        """Ids of the quantizations whose nodes got a cancel."""

    def _load(self) -> list[QuantizationRecord]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[QuantizationRecord])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("quantizations unreadable", file=str(self._file), why=str(error)[:200])
            return []

    def _store(self) -> None:
        try:
            write_private(self._file, msgspec.json.encode(list(self._all.values())))
        except OSError as error:
            log.warning("quantizations not stored", file=str(self._file), why=error.strerror)

    def list_all(self) -> tuple[QuantizationRecord, ...]:
        """Return all quantizations, oldest first."""
        return tuple(self._all.values())

    def find(self, quantization: str) -> QuantizationRecord | None:
        """Return the quantization with this id; None if there is none."""
        return self._all.get(quantization)

    def start(self, node: NodeId, model: str, bits: int, name: str, actor: str) -> QuantizationRecord:
        """Start a quantization of a model to `bits` bits per weight on a node, and return it.

        `name` is the name of the result. `actor` is the actor for the record (`AuditRow.actor`). If a quantization with
        the same model, bits and name runs on the node and is not cancelled, return it. Delete the oldest ended
        quantizations above `MAX_ENDED`. If the node is not linked, the returned quantization has failed. Raise
        `TooManyQuantizationsError` if `MAX_OPEN` are open.
        """
        opened = self._list_open()
        for record in opened:
            order = record.order
            is_same = (record.node, order.model, order.bits, order.name) == (node, model, bits, name)
            if is_same and record.id not in self._cancelled:
                return record
        if len(opened) >= MAX_OPEN:
            raise TooManyQuantizationsError(f"{MAX_OPEN} quantizations are open, which is the limit: wait for one")
        order = QuantizeModel(self._number(), model, bits, name)
        started = QuantizationRecord(
            id=f"quantize-{secrets.token_hex(6)}", node=node, order=order, started=self._wall(), actor=actor
        )
        self._all[started.id] = started
        for record in [record for record in self._all.values() if record.ended is not None][:-MAX_ENDED]:
            del self._all[record.id]
        log.info("quantization started", quantization=started.id, model=model, bits=bits, name=name, node=node)
        self._store()
        if not self._send(node, order):
            self._fail(started, "the node is not linked: try again when it is back")
        return self._all[started.id]

    def cancel(self, quantization: str) -> bool:
        """Order the node to cancel a quantization.

        Return False if the quantization is unknown or has ended, or if its node is not linked.
        """
        record = self._all.get(quantization)
        if record is None or record.stage is not QuantizationStage.RUNNING:
            return False
        if not self._send(record.node, CancelModelOrder(record.order.order)):
            return False
        self._cancelled.add(record.id)
        return True

    def close(self) -> None:
        """Stop all timers. Quantizations continue on their nodes."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # events of nodes

    def handle_frame(self, node: NodeId, frame: ModelOrderProgress | ModelOrderEnded) -> None:
        """Apply a frame of a node about its quantization. Ignore frames about other orders."""
        record = next(
            (record for record in self._list_open() if (record.node, record.order.order) == (node, frame.order)), None
        )
        if record is None:
            return
        self._cancel_timer(record.id)
        if isinstance(frame, ModelOrderProgress):
            self._all[record.id] = replace(
                record, phase=frame.phase, done=frame.done, total=frame.total, speed=frame.speed, is_linked=True
            )
            return
        stages = {
            ModelOrderCode.COMPLETED.value: QuantizationStage.COMPLETED,
            ModelOrderCode.CANCELLED.value: QuantizationStage.CANCELLED,
        }
        ended = replace(
            record,
            ended=self._wall(),
            stage=stages.get(frame.code, QuantizationStage.FAILED),
            code=frame.code,
            message=frame.message,
            stored=frame.stored,
            peak=frame.peak,
        )
        self._all[record.id] = ended
        self._cancelled.discard(record.id)
        self._store()
        log.info("quantization ended", quantization=record.id, stage=str(ended.stage), why=frame.message)

    def apply_links(self, lost: Collection[NodeId], linked: Collection[NodeId]) -> None:
        """Handle links that nodes have lost or opened.

        A quantization fails if its node links again and does not report it within `RETURN_TIMEOUT_SECONDS`.
        """
        for record in self._list_open():
            if record.node in lost or record.node in linked:
                self._cancel_timer(record.id)
                self._all[record.id] = replace(record, is_linked=record.node in linked)
            if record.node in linked:
                loop = asyncio.get_running_loop()
                self._timers[record.id] = loop.call_later(RETURN_TIMEOUT_SECONDS, self._fail_unreported, record.id)

    def remove_node(self, node: NodeId) -> None:
        """End the quantizations of a node that has left the pool, as failed."""
        for record in self._list_open():
            if record.node == node:
                self._fail(record, "the node has left the pool")

    def _fail_unreported(self, quantization: str) -> None:
        self._timers.pop(quantization, None)
        text = "the node was restarted meanwhile and has discarded the result: start again"
        self._fail(self._all[quantization], text)

    def _fail(self, record: QuantizationRecord, why: str) -> None:
        self._cancel_timer(record.id)
        self._cancelled.discard(record.id)
        code = ModelOrderCode.FAILED
        self._all[record.id] = replace(
            record, ended=self._wall(), stage=QuantizationStage.FAILED, code=code, message=why
        )
        self._store()

    def _cancel_timer(self, quantization: str) -> None:
        timer = self._timers.pop(quantization, None)
        if timer is not None:
            timer.cancel()

    def _list_open(self) -> list[QuantizationRecord]:
        return [record for record in self._all.values() if record.stage is QuantizationStage.RUNNING]
