"""Drive a real text engine on MLX without processes: pass frames, step its loop, and keep all its frames."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from node.engine.build import compose
from node.engine.kv.kv_cache import Layers, TextModel, create_cache
from node.engine.memory.footprint import MetalMemory, open_metal
from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.models.loaded_model import LoadedModel, run_forward
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.process.interface import Work
from node.engine.requests.sequence import Row, Sequence
from node.engine.requests.tokenize_admission import UntokenizedPrompt
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.rules.row_state import RowState
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tokenizer_trial import TokenizerTrials
from node.models.catalogue import ModelCatalogue
from node.settings import EngineSettings, MemorySettings, MlxSettings, ModelSettings, NodeSettings
from wire.capacity.arithmetic import Fits
from wire.frames import (
    Admitted,
    Cancel,
    Channel,
    Delta,
    Deltas,
    Embed,
    Failed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    Logprob,
    MemoryLimits,
    Message,
    Refusal,
    Vectors,
)
from wire.refusals import RefusalCode, Refused
from wire.report import Hardware, Memory
from wire.units import GIB, MIB

ROOMY = MemoryLimits(8 * GIB, 8 * GIB, 64 * MIB, "static")
GREEDY = GenerationParams(temperature=0.0)
ONE_TOKEN = GenerationParams(temperature=0.0, max_tokens=1)
"""Parameters of a request that only loads a model."""
End = Finished | Refusal | Failed


def prefilled(model: TextModel, ids: list[int], chunk: int = 64) -> tuple[Layers, mx.array]:
    """Prefill a prompt (token ids) in chunks; return its cache and the logits after it, shape (1, vocabulary)."""
    cache, logits = create_cache(model), None
    for start in range(0, len(ids), chunk):
        logits = run_forward(model, ids[start : start + chunk], cache, last=start + chunk >= len(ids))
    assert logits is not None
    return cache, logits


def decoded_alone(model: TextModel, ids: list[int], count: int) -> list[int]:
    """Return tokens decoded greedily after a prompt (token ids), without any batch."""
    cache, logits = prefilled(model, ids)
    out = [likeliest(logits[0])]
    while len(out) < count:
        out.append(likeliest(model(mx.array([[out[-1]]]), cache=cache)[0, -1]))
    return out


def likeliest(logits: mx.array) -> int:
    """Return the token with the highest logit of one row, shape (vocabulary,)."""
    token = mx.argmax(logits).item()
    assert isinstance(token, int)
    return token


class ScriptedGate(MemoryGate):
    """A gate that records each check, and also refuses where `refuses(site, bytes)` is true."""

    def __init__(self, residual: Callable[[], int | None] = lambda: None) -> None:
        super().__init__(residual)
        self.asked: list[tuple[GateSite, int]] = []
        self.refuses: Callable[[GateSite, int], object] = lambda site, estimate: False

    def check(self, site: GateSite, memory: Memory, estimate: int, *, load: bool = False) -> Fits | Refused:
        """Check, record the check, and refuse by script."""
        answer = super().check(site, memory, estimate, load=load)
        self.asked.append((site, estimate))
        return Refused(RefusalCode.NO_ROOM, "no room by script") if self.refuses(site, estimate) else answer


class Driver:
    """An engine over the models in some folders, and its frames by request."""

    def __init__(
        self,
        *folders: Path,
        limits: MemoryLimits | None = ROOMY,
        preload: tuple[str, ...] = (),
        profile: str = "off",
        profiles: Path | None = None,
        idle_unload: float = 0.0,
        canary: str = "off",
        wire: str = "auto",
        metal: Callable[[], MetalMemory] = open_metal,
        trials: TokenizerTrials | None = None,
        disk_folder: Path | None = None,
        **mlx: float | str,
    ) -> None:
        models = ModelSettings(
            trial=trials is not None,
            folders=tuple(map(str, folders)),
            use_huggingface_cache=False,
            preload=preload,
            profile=profile,
            idle_unload_seconds=idle_unload,
        )
        engine = EngineSettings(kind="mlx", mlx=MlxSettings(**mlx))  # type: ignore[arg-type]
        settings = NodeSettings(engine=engine, models=models, memory=MemorySettings(reserve=canary, wire=wire))
        library = ModelCatalogue(models)
        library.scan()
        self.recorder = CrashRecorder()
        self.engine = compose(
            settings,
            library,
            self.recorder,
            Hardware("test", 16 * GIB),
            profiles,
            metal=metal,
            create_gate=ScriptedGate,
            disk_folder=disk_folder,
            trials=trials,
        )
        self.said: dict[int, list[Frame]] = defaultdict(list)
        self.text: dict[tuple[int, int, int], str] = defaultdict(str)
        self.ids: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.deltas: dict[tuple[int, int], list[Delta]] = defaultdict(list)
        self.logprobs: dict[tuple[int, int], list[Logprob]] = defaultdict(list)
        self.asked: dict[int, tuple[float, str]] = {}
        """Monotonic time and model of each request of `ask`."""
        self._now = 0.0
        self._sequences: dict[int, Sequence] = {}
        self._max_rows = engine.mlx.max_batch_size
        self.number = 0
        self.turns = 0
        self.default = next(iter(library.get_models()))
        if limits is not None:
            self.take(limits)

    def take(self, frame: Frame) -> None:
        """Pass a frame to the engine like the I/O thread."""
        work = self.engine.prepare(frame)
        if work is not None:
            self.put(work)

    def put(self, work: Work) -> None:
        """Pass prepared work to the engine, and tokenize at once each prompt that it returns for that."""
        for said in self.engine.handle(work, time.monotonic()):
            if isinstance(said, UntokenizedPrompt):
                self.put(said.tokenize())
            else:
                self._keep([said])
        self._check()

    def ask(self, content: str = "Hello!", params: GenerationParams = GREEDY, **fields: object) -> int:
        """Send a request; return its number."""
        self.number += 1
        messages = fields.pop("messages", (Message("user", content),))
        model = fields.pop("model", self.default)
        self.asked[self.number] = time.monotonic(), str(model)
        name = fields.pop("request_id", f"r{self.number}")
        self.take(Generate(self.number, self.number, name, model, messages, params, 0, **fields))  # type: ignore[arg-type]
        return self.number

    def embed(self, *texts: str, ids: tuple[tuple[int, ...], ...] = (), **fields: object) -> int:
        """Send a request for embeddings; return its number."""
        self.number += 1
        model = fields.pop("model", self.default)
        self.take(Embed(self.number, self.number, f"r{self.number}", model, texts, ids, **fields))  # type: ignore[arg-type]
        return self.number

    def vectors(self, number: int) -> np.ndarray:
        """Step until a request for embeddings has ended, and return its vectors by place.

        Raise AssertionError if the request ends without Finished, or if a text has several vectors.
        """
        end = self.end(number)
        assert isinstance(end, Finished), end
        found: dict[int, np.ndarray] = {}
        for frame in self.said[number]:
            if isinstance(frame, Vectors):
                rows = np.frombuffer(frame.data, np.float32).reshape(len(frame.places), -1)
                assert not found.keys() & set(frame.places)
                found |= dict(zip(frame.places, rows, strict=True))
        assert sorted(found) == list(range(len(found)))
        return np.stack([found[place] for place in sorted(found)])

    @property
    def gate(self) -> ScriptedGate:
        """Return the gate of the engine."""
        gate = self.engine.gate
        assert isinstance(gate, ScriptedGate)
        return gate

    def resident(self, model: str = "") -> LoadedModel:
        """Return a loaded model."""
        return self.engine.parts.models.loaded[model or self.default]

    def batches(self, model: str = "") -> Mapping[int, DecodeBatch[Row]]:
        """Return the decode batches of a loaded model by number."""
        return self.engine.parts.scheduler.get_batches(model or self.default)

    def replace_model(self, model: TextModel) -> None:
        """Replace the mlx-lm model of the default model, for all requests from now on."""
        self.engine.parts.models.put(replace(self.resident(), model=model))

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the default model."""
        return self.engine.parts.preparer.load_tokenizer(self.engine.parts.catalogue.get_models()[self.default])

    def turn(self) -> None:
        """Run one step of the engine."""
        self.turns += 1
        self._now = time.monotonic()
        for frames in self.engine.step(self._now):
            self._keep(frames)
        self._check()

    def _check(self) -> None:
        """Raise AssertionError if an invariant of rows or loads is violated.

        The scheduler must also report the load of its live requests, and a next step while there are any. Rows are
        within the limit of the batch, and their tokens within their commitments. A prefill's first commitment has the
        tokens of its cache.
        """
        broken = self.engine.check()
        assert not broken, broken
        scheduler = self.engine.parts.scheduler
        rows = [row for sequence in scheduler.live.values() for row in sequence.iterate_active_rows()]
        decoding = [row for row in rows if row.state is RowState.DECODE]
        waiting = len(scheduler.prefills) + len(scheduler.preempted)
        left = sum(prefill.left for prefill in scheduler.prefills)
        assert scheduler.measure_load() == (len(decoding), waiting, left)
        assert not rows or scheduler.next_step_at(time.monotonic()) is not None
        assert all(scheduler.has_request(number) for number in scheduler.live)
        assert not scheduler.has_request(-1)
        ready = [prefill for prefill in scheduler.prefills if prefill.started and not prefill.retry_at]
        assert scheduler.can_prefill(time.monotonic()) >= bool(scheduler.preempted or ready)
        assert scheduler.can_prefill(time.monotonic()) <= bool(waiting)
        started = sum(prefill.width for prefill in scheduler.prefills if prefill.started)
        assert len(decoding) + started <= self._max_rows
        for prefill in scheduler.prefills:
            stored = prefill.stored_tokens if prefill.started else 0
            assert prefill.rows[0].commitment.stored_tokens == stored, prefill.rows[0].commitment
        self._sequences.update(scheduler.live)
        for row in decoding:
            stored = row.commitment.stored_tokens
            assert stored == len(row.list_token_ids()) <= row.commitment.committed_tokens, row.commitment

    def _check_end(self, end: Finished) -> None:
        """Raise AssertionError if the numbers of an answer contradict each other, its tokens or the clock.

        Its model must count as used until its end.
        """
        times, sent = end.timings, sum(len(self.ids[end.request, choice]) for choice in range(len(end.reasons)))
        assert min(times.waiting, times.prefill, times.decode) >= 0, times
        asked_at, model = self.asked.get(end.request, (0.0, ""))
        seconds = time.monotonic() - asked_at
        assert times.waiting + times.prefill + times.decode <= seconds, (times, seconds)
        assert end.cached_tokens <= end.prompt_tokens, end
        assert max(end.reasoning_tokens, sent) <= end.completion_tokens, (end, sent)
        assert not model or self.resident(model).usage.used_at >= self._now
        if end.request in self._sequences:
            self._check_tokens(end, self._sequences.pop(end.request))

    def _check_tokens(self, end: Finished, sequence: Sequence) -> None:
        """Raise AssertionError if a choice was not sent whole, or if its tokens contradict its end."""
        params = sequence.request.params
        assert (end.prompt_tokens, len(end.reasons)) == (len(sequence.prompt), params.n)
        assert end.completion_tokens == sum(len(row.ids) for row in sequence.rows)
        for row in sequence.rows:
            key, at_limit = (end.request, row.choice), len(row.ids) >= sequence.shape.limit
            assert self.ids[key] == row.ids[row.resumed_tokens :], "each new token is sent once"
            assert (end.reasons[row.choice], row.new, row.pieces, row.logprobs) == (row.reason, [], [], [])
            assert at_limit or row.reason != "length", row.ids
            written = [token for token in self.ids[key] if token not in sequence.prepared.eos]
            assert len(self.logprobs[key]) == (len(written) if params.logprobs else 0)
            assert all(logprob.logprob <= 1e-3 for logprob in self.logprobs[key]), self.logprobs[key]

    def until(self, wanted: Callable[[], object], turns: int = 20_000) -> None:
        """Step until a condition holds. Raise AssertionError if the engine has no work before, or after `turns`."""
        for _ in range(turns):
            if wanted():
                return
            due = self.engine.next_step_at(time.monotonic())
            assert due is not None, "the engine rests"
            time.sleep(max(0.0, due - time.monotonic()))  # as its loop waits
            self.turn()
        raise AssertionError(f"it did not come true within {turns} turns")

    def end(self, number: int) -> End:
        """Step until a request has ended, and return its end."""
        self.until(lambda: self.ended(number))
        end = self.ended(number)
        assert end is not None
        return end

    def ended(self, number: int) -> End | None:
        """Return the last frame of a request, None if the request has not ended."""
        ends = [frame for frame in self.said[number] if isinstance(frame, Finished | Refusal | Failed)]
        assert len(ends) <= 1, ends
        return ends[0] if ends else None

    def answer(self, content: str, params: GenerationParams = GREEDY, **fields: object) -> str:
        """Return the complete content of the answer to a question."""
        number = self.ask(content, params, **fields)
        end = self.end(number)
        assert isinstance(end, Finished), end
        return self.text[number, 0, Channel.CONTENT]

    def cancel(self, number: int) -> None:
        """Cancel a request."""
        self.take(Cancel(number))

    def admitted(self, number: int) -> bool:
        """Return whether a request was admitted."""
        return any(isinstance(frame, Admitted) for frame in self.said[number])

    def _keep(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            if isinstance(frame, Deltas):
                for delta in frame.deltas:
                    assert self.ended(delta.request) is None, "nothing follows an end"
                    self.deltas[delta.request, delta.choice].append(delta)
                    self.ids[delta.request, delta.choice] += delta.ids
                    self.logprobs[delta.request, delta.choice] += delta.logprobs
                    for channel, text in delta.pieces:
                        self.text[delta.request, delta.choice, channel] += text
            else:
                self.said[frame.request].append(frame)  # type: ignore[attr-defined]
                if isinstance(frame, Finished):
                    self._check_end(frame)
