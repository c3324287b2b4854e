"""Memory profiler: measure a model on this machine, by a short probe at a load without a stored profile, or by a sweep
on order.

The probe (`memory_probe`) ensures that the estimator has samples of many shapes from the start.

The residual is the largest number of bytes by which a forward exceeded the sum of its KV and its estimate. A forward is
measured by the kernel's high-water mark of the footprint, if there is one. The gate's margin follows from the residual.
If no other model is loaded, the longest row is then checked against a reading (`node.engine.models.context_search`).

`node.engine.models.profile` stores the measurements.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import cycle, islice
from pathlib import Path

import msgspec
import structlog
from tokenizers import Tokenizer

from node.engine.models.context_search import ContextSearchResult, describe_failed_search, search_context
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.memory_probe import CheckGate, ForwardPeak, MemoryProbe
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.profile import MemoryProfile, MemoryProfileKey, MemoryProfileStore, build_key
from node.engine.process.device_errors import raise_if_device_lost
from wire.capacity.batches import compute_row_bytes
from wire.report import Hardware
from wire.units import show_size

PROBE_SECONDS = 10.0
"""Maximum duration of the probe at a load, in seconds; also the expected duration until a probe was timed."""
PROBE_ROW_TOKENS = 3072
"""Maximum tokens of the long row of the probe at a load, and of the sample text, which longer rows repeat."""
SWEEP_SECONDS = 600.0
"""Maximum duration of a sweep, in seconds."""

log = structlog.get_logger("engine.profile")


def tokenize_sample_text(folder: Path, vocabulary: int, count: int) -> list[int]:
    """Return `count` token ids of real text, this program's own source, for the model in `folder`. The ids repeat if
    the text has fewer tokens.

    If `tokenizer.json` cannot be used, return varied ids below `vocabulary`. Consecutive ids would not do, because they
    activate only few experts of a mixture-of-experts model.
    """
    text = "".join(file.read_text() for file in sorted(Path(__file__).parents[1].rglob("*.py")))
    try:
        found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text[: 16 * count]).ids
    except Exception as error:  # the library raises plain Exception
        log.info("profile text", cause=f"no text in this model's tokens: {error}"[:200])
        found = []
    varied = ((n * n * 7919 + n * 31) % vocabulary for n in range(count))
    return list(islice(cycle([token for token in found if token < vocabulary] or varied), count))


class Profiler:
    """Profiler of loaded models, which applies the stored profile of a model or measures a new profile.

    `check(need)` returns whether the gate passes `need` bytes. `longest(model)` returns the longest row that the memory
    costs of a model allow, in tokens. `narrowed()` returns the bytes by which profiles narrow the margin. `chunk` is
    the maximum tokens of a prefill forward, and `batch` the maximum rows that decode together. `context` is the context
    length from the settings in tokens (0: none). Without `enabled`, a load uses and measures no profile.
    """

    def __init__(
        self,
        profiles: MemoryProfileStore,
        hardware: Hardware,
        check: CheckGate,
        peak_meter: ForwardPeak,
        longest: Callable[[LoadedModel], int],
        narrowed: Callable[[], int],
        *,
        chunk: int,
        batch: int,
        context: int,
        enabled: bool,
    ) -> None:
        self._profiles, self._hardware, self._check, self._peak_meter = profiles, hardware, check, peak_meter
        self._longest, self._narrowed, self._context = longest, narrowed, context
        self._chunk, self._batch, self._enabled = chunk, batch, enabled
        self._keys: dict[str, MemoryProfileKey] = {}
        self._known: set[str] = set()
        """Fingerprints of models with a stored profile."""
        self._checked: set[str] = set()
        """Fingerprints of models whose longest row this process has checked against a memory reading."""

    def estimate_seconds(self, descriptor: ModelDescriptor) -> float:
        """Return the expected seconds of measuring a model at its next load: `PROBE_SECONDS`, or 0.0 if it is not
        measured, because a profile is stored, the model is an encoder, or the profiler is not `enabled`."""
        fingerprint, layout = descriptor.fingerprint, descriptor.layout
        if not self._enabled or fingerprint in self._known or (layout is not None and layout.encoder is not None):
            return 0.0
        if fingerprint not in self._keys:
            self._keys[fingerprint] = build_key(fingerprint, self._hardware)
        if not self._profiles.has(self._keys[fingerprint]):
            return PROBE_SECONDS
        self._known.add(fingerprint)
        return 0.0

    def probe(self, loaded_model: LoadedModel, *, alone: bool) -> Iterator[None]:
        """Set the memory profile of a model: the stored profile, or a new profile if none is stored for its KV
        parameters. Each step of the iterator runs one forward of the measurement.

        Measure again if the gate ended the stored measurement early and now has room for more. Also measure again, once
        per process, if the longest row of the stored profile failed, because its diagnosis asks for other settings. If
        a new measurement runs no forward, the stored profile is used.

        `alone`: no other model is loaded. The longest row of a new profile is then checked against a memory reading. A
        failed measurement is logged and does not end the load, but `DeviceLost` propagates. An encoder has no rows and
        gets no profile.
        """
        if not self._enabled or not loaded_model.has_rows:
            return
        key = build_key(loaded_model.descriptor.fingerprint, self._hardware)
        stored = self._profiles.read(key)
        if stored is not None and stored.kv != loaded_model.kv:
            stored = None
        if stored is not None and not self._should_measure_again(stored, alone=alone):
            self._apply_profile(loaded_model, stored)
            log.info("profile", model=loaded_model.name, source="kept", residual=show_size(stored.residual))
            if stored.failed:
                log.warning("profile", model=loaded_model.name, cause=stored.failed)
            return
        try:
            probe = self._create_probe(loaded_model, PROBE_ROW_TOKENS, PROBE_SECONDS, full=False)
            yield from probe.run()
            yield from self._store_result(probe, key, self._check if alone else None)
            if loaded_model.stats.profile is not None and loaded_model.stats.profile.failed:
                log.warning("profile", model=loaded_model.name, cause=loaded_model.stats.profile.failed)
        except Exception as error:
            raise_if_device_lost(error)
            log.warning("probe broken", model=loaded_model.name, error=f"{type(error).__name__}: {error}"[:300])
        if stored is not None and loaded_model.stats.profile is None:
            self._apply_profile(loaded_model, stored)

    def _should_measure_again(self, stored: MemoryProfile, *, alone: bool) -> bool:
        """Return whether a stored profile is measured again.

        It is if the gate now admits twice the forward at which it ended that measurement. It also is if the longest row
        failed, and this process has not checked it. A measurement with less room would perhaps end at the same forward,
        at each load again.
        """
        if stored.refused_bytes:
            return self._check(2 * stored.refused_bytes)
        return bool(stored.failed) and alone and stored.key.fingerprint not in self._checked

    def create_sweep_probe(self, loaded_model: LoadedModel) -> MemoryProbe:
        """Return a probe for a sweep of a model, which measures as far as the gate allows. `store_sweep` stores its
        result after the run."""
        return self._create_probe(loaded_model, loaded_model.descriptor.context, SWEEP_SECONDS, full=True)

    def store_sweep(
        self, probe: MemoryProbe, check: CheckGate | None
    ) -> Generator[None, None, ContextSearchResult | None]:
        """Store the result of a sweep as the profile of its model, and apply it to the loaded model. Return the result
        of the search for the longest row, which checks it with `check`.

        If `check` is None, because other work is running, there is no search, and the result is None. If no forward was
        measured, nothing is stored, and the result is None as well. The generator yields between attempts.
        """
        key = build_key(probe.loaded_model.descriptor.fingerprint, self._hardware)
        return (yield from self._store_result(probe, key, check))

    def _create_probe(self, loaded_model: LoadedModel, reach: int, seconds: float, *, full: bool) -> MemoryProbe:
        reach = min(reach, loaded_model.descriptor.context, self._context or reach)
        ids = tokenize_sample_text(
            Path(loaded_model.descriptor.folder), loaded_model.vocabulary, min(reach, PROBE_ROW_TOKENS)
        )
        chunk = min(self._chunk, loaded_model.descriptor.context)
        return MemoryProbe(loaded_model, ids, self._check, self._peak_meter, chunk, self._batch, reach, seconds, full)

    def _store_result(
        self, probe: MemoryProbe, key: MemoryProfileKey, check: CheckGate | None
    ) -> Generator[None, None, ContextSearchResult | None]:
        """Store the result of a probe and apply it to the model, checked against a reading if `check` is set."""
        loaded_model, result, profile = probe.loaded_model, None, probe.build_profile(key)
        if probe.chunks and check is not None:
            result = yield from self._search_longest_row(probe, check)
            self._checked.add(key.fingerprint)
            failed = "" if result.ok else describe_failed_search(loaded_model.name, result)
            profile = msgspec.structs.replace(profile, share=result.share, failed=failed)
        if probe.chunks:
            self._profiles.write(profile)
            self._apply_profile(loaded_model, profile)
        log.info(
            "profile",
            model=loaded_model.name,
            source="measured",
            forwards=len(probe.chunks),
            chunk=profile.chunk,
            reach=profile.reach,
            rows=profile.rows,
            seconds=profile.seconds,
            residual=show_size(profile.residual),
            highest=show_size(profile.highest),
            settled=None if result is None else result.tokens,
        )
        return result

    def _search_longest_row(self, probe: MemoryProbe, check: CheckGate) -> Generator[None, None, ContextSearchResult]:
        """Check the longest row against a reading. A length from the settings is only tried, not searched for."""
        loaded_model = probe.loaded_model
        tokens = min(self._context, loaded_model.descriptor.context) or self._longest(loaded_model)

        def passes(tokens: int) -> bool:
            transient = loaded_model.estimator.estimate_chunk(min(tokens, probe.chunk), max(0, tokens - probe.chunk))
            return check(compute_row_bytes(loaded_model.kv, tokens) + transient) and probe.repeat_largest()

        return (yield from search_context(tokens, passes, search=not self._context))

    def _apply_profile(self, loaded_model: LoadedModel, profile: MemoryProfile) -> None:
        loaded_model.estimator.set_coefficients(profile.transient, profile.highest)
        loaded_model.estimator.set_profiled_range(profile.chunk, profile.rows, self._narrowed)
        loaded_model.stats.record_profile(profile)
