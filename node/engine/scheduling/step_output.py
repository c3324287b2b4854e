"""Output of the scheduler: deltas of decoding rows, and the ends of requests."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from node.engine.requests.sequence import Sequence
from wire.frames import Delta, Finished, Frame, Timings, split_deltas


@dataclass(slots=True)
class StepOutput:
    """Output since the last `drain`: `deltas` of the rows of all batches, and `ends`, the final frames of requests."""

    deltas: list[Delta] = field(default_factory=list[Delta])
    ends: list[Frame] = field(default_factory=list[Frame])

    def add_deltas(self, deltas: Iterable[Delta]) -> None:
        """Add deltas of a row to the output."""
        self.deltas += deltas

    def add_end(self, end: Frame) -> None:
        """Add the final frame of a request to the output."""
        self.ends.append(end)

    def drain(self) -> list[Frame]:
        """Return the frames in the order in which they must be sent, and clear the output. Deltas, in the frames of
        `split_deltas`, precede ends."""
        frames = [*split_deltas(self.deltas), *self.ends]
        self.deltas, self.ends = [], []
        return frames


def build_finished(sequence: Sequence, now: float) -> Finished:
    """Return the `Finished` frame of a request that ends at the monotonic time `now`. It has the finish reasons, the
    token counts, and the seconds of waiting, prefill and decode."""
    timings = Timings(sequence.begun - sequence.arrived, sequence.joined - sequence.begun, now - sequence.joined)
    stops = tuple(row.pipeline.stop for row in sequence.rows)
    return Finished(
        sequence.number,
        tuple(row.reason for row in sequence.rows),
        sequence.shape.prompt,
        sum(len(row.ids) for row in sequence.rows),
        sequence.prompt_cached,
        timings,
        stops=stops if any(stops) else (),
        reasoning_tokens=sum(row.pipeline.reasoning_tokens for row in sequence.rows),
    )
