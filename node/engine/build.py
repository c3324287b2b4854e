"""Composition of the text engine, the engine kind `mlx`: every part gets its collaborators in its constructor."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from node.engine.admission_rules import RequestLimits
from node.engine.embedding.beginning_store import BeginningStore
from node.engine.embedding.preparer import EmbeddingPreparer
from node.engine.embedding.request import EmbeddingTable
from node.engine.embedding.scheduler import EmbeddingScheduler
from node.engine.engine import EngineParts, TextEngine
from node.engine.kv.disk.disk_cache import DiskCache
from node.engine.kv.kv_cache import Layers
from node.engine.kv.prefix_memory import PrefixMemory, compute_limit
from node.engine.kv.prefix_store import PrefixCache
from node.engine.memory.footprint import EngineMemory, MetalMemory, MlxPeakTracker, WiredLimit, open_metal
from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.memory.gated_forward import GatedForwards
from node.engine.memory.least_squares import load_solver
from node.engine.memory.memory_reader import MemoryReader
from node.engine.memory.reserve import EmergencyReserve
from node.engine.memory.wired_limit import WireMode
from node.engine.model_commands import ModelCommands
from node.engine.model_describer import DescriberRules, ModelDescriber
from node.engine.model_report import LoadFacts, ModelFacts, compute_longest_row, describe_loaded, describe_unloaded
from node.engine.models.load_blocks import LoadBlocks
from node.engine.models.load_times import LoadTimes
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.memory_probe import ForwardPeak
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_loader import ModelLoader
from node.engine.models.model_manager import ModelManager
from node.engine.models.model_table import ModelTable
from node.engine.models.model_unloader import ModelUnloader
from node.engine.models.model_wiring import ModelWiring
from node.engine.models.profile import MemoryProfileStore
from node.engine.models.profile_sweep import RunningSweep, SweepQueue
from node.engine.models.profiler import Profiler
from node.engine.process.interface import CallRecording
from node.engine.request_admission import RequestAdmission
from node.engine.requests.preparer import RequestPreparer
from node.engine.requests.waiting_requests import WaitingRequests
from node.engine.scheduling.disk.disk_tier import DiskTier
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from node.engine.text.tokenizer_trial import TokenizerTrials
from node.engine_process.environment import DIGESTS, DISK_CACHE, PROFILES
from node.hub.digests import DigestStore, find_content
from node.memory.sensor import open_machine
from node.models.catalogue import ModelCatalogue
from node.models.last_use import LastUse
from node.settings import NodeSettings
from wire.capacity.arithmetic import Fits
from wire.report import Hardware
from wire.units import parse_size

log = structlog.get_logger("engine.text")


def build(settings: NodeSettings, recorder: CallRecording) -> TextEngine:
    """Scan the model folders, queue the loads of the preloaded models, and return the text engine for these settings.

    All existing objects are exempted from garbage collection (`gc.freeze`). `recorder` records the calls of MLX. Raise
    `ValueError` if the size of the disk cache cannot be parsed.

    Environment variables name the places on the disk: `MACPOOL_PROFILES` the folder of measurements, `MACPOOL_DIGESTS`
    the file of digests, `MACPOOL_DISK_CACHE` the folder of the disk cache. Without a variable, nothing is stored there.
    """
    digests = os.environ.get(DIGESTS)
    store = None if digests is None else DigestStore(Path(digests))
    catalogue = ModelCatalogue(
        settings.models, find_content=lambda folder: "" if store is None else find_content(folder, store)
    )
    catalogue.scan()
    gc.freeze()
    folder, disk = (Path(value) if value else None for value in map(os.environ.get, (PROFILES, DISK_CACHE)))
    return compose(settings, catalogue, recorder, open_machine(settings).hardware, folder, disk_folder=disk)


def compose(
    settings: NodeSettings,
    catalogue: ModelCatalogue,
    recorder: CallRecording,
    hardware: Hardware,
    profiles: Path | None,
    *,
    disk_folder: Path | None = None,
    metal: Callable[[], MetalMemory] = open_metal,
    create_gate: Callable[[Callable[[], int | None]], MemoryGate] = MemoryGate,
    trials: TokenizerTrials | None = None,
) -> TextEngine:
    """Return a text engine for the models of a catalogue, and queue the loads of the preloaded models.

    `profiles` is the folder of measurements; None: they are not stored. `disk_folder` is the folder of the disk cache;
    None: no disk cache. `metal()` opens the Metal device. `create_gate(residual)` returns the memory gate, where
    `residual()` returns the worst residual of the loaded models in bytes (`ModelTable.compute_residual`). `trials` are
    the trials of tokenizers; None: trials whose results are stored in `profiles`. Raise `ValueError` if the size of the
    disk cache cannot be parsed.
    """
    mlx = settings.engine.mlx
    scheduler_limits = SchedulerLimits(mlx.max_batch_size, mlx.prefill_step_size, mlx.min_prefill_step)
    floor = min(mlx.prefill_step_size, mlx.min_prefill_step)
    limits = RequestLimits(mlx.max_tokens, mlx.max_context, mlx.max_batch_size)
    pinned = frozenset(settings.models.preload)

    # state and its readings
    models, waiting, blocks, prefixes = ModelTable(), WaitingRequests(), LoadBlocks(), PrefixCache[Layers]()
    embedding_table = EmbeddingTable()
    trials, times = trials or TokenizerTrials(profiles), LoadTimes(profiles)
    gate = create_gate(lambda: models.compute_residual(floor))
    load_solver()
    disk = open_disk_cache(disk_folder, mlx.disk_cache_size, mlx.disk_cache_min_seconds)
    footprint = EngineMemory(hardware.memory, lambda: models.compute_known_bytes() + prefix_memory.nbytes)

    def compute_reserved_bytes() -> int:
        holders = (models, waiting, embedding_table)
        return sum(holder.compute_reserved_bytes() for holder in holders)

    memory = MemoryReader(footprint, gate, compute_reserved_bytes)
    peak_tracker = MlxPeakTracker()

    def find_cause(descriptor: ModelDescriptor, now: float) -> str:
        return blocks.find_cause(descriptor, now) or trials.find_cause(descriptor.fingerprint)

    def find_longest_row(loaded_model: LoadedModel) -> int:
        facts = ModelFacts(limits.get_max_row_tokens(loaded_model.descriptor), (), pinned=False, floor=floor)
        if loaded_model.name in models.loaded:
            model = describe_loaded(loaded_model, loaded_model.descriptor, facts, gate.compute_narrowed_bytes, 0.0)
        else:
            model = describe_unloaded(loaded_model.descriptor, facts, LoadFacts())
        return compute_longest_row(model, loaded_model, memory.read_now(), floor)

    # models
    wiring = ModelWiring(WiredLimit(WireMode(settings.memory.wire), metal), models, footprint.reset_peak)
    prefix_memory = PrefixMemory(
        prefixes,
        memory.read_now,
        lambda cap: compute_limit(mlx.prefix_cache_size, cap, models.sum_weights()),
        footprint.reset_peak,
        disk,
        memory.read_settled,
    )
    prefix_cache = PrefixCacheManager(prefixes, prefix_memory, DiskTier(disk, prefix_memory, disk_folder))
    reserve = EmergencyReserve(settings.memory.reserve, memory.read_now)
    running_sweep = RunningSweep()
    profiler = Profiler(
        MemoryProfileStore(profiles),
        hardware,
        lambda need: isinstance(gate.check(GateSite.PROBE, memory.read_now(), need), Fits),
        ForwardPeak(peak_tracker, footprint.sensor, memory.wait_until_settled),
        find_longest_row,
        gate.compute_narrowed_bytes,
        chunk=mlx.prefill_step_size,
        batch=mlx.max_batch_size,
        context=mlx.max_context,
        enabled=settings.models.profile == "auto",
    )
    unloader = ModelUnloader(
        table=models,
        prefix_cache=prefix_cache,
        catalogue=catalogue,
        spares=(reserve, running_sweep),
        memory=memory.read_settled,
        on_released=wiring.on_released,
        pinned=pinned,
        max_idle_seconds=settings.models.idle_unload_seconds,
    )
    manager = ModelManager(
        table=models,
        unloader=unloader,
        blocks=blocks,
        catalogue=catalogue,
        gate=gate,
        memory=memory,
        on_released=wiring.on_released,
        pieces=ModelLoader(models, catalogue, wiring, profiler, times).load_pieces,
    )

    # requests
    preparer = RequestPreparer(
        catalogue,
        limits.get_max_row_tokens,
        recorder=recorder,
        trials=trials if settings.models.trial else None,
        barred=lambda found: find_cause(found, time.monotonic()),
    )
    describer = ModelDescriber(
        table=models,
        manager=manager,
        catalogue=catalogue,
        gate=gate,
        times=times,
        profiler=profiler,
        last_use=LastUse(profiles),
        rules=DescriberRules(limits, preparer.list_features, find_cause, pinned, floor),
    )
    forwards = GatedForwards(
        recorder, memory, peak_tracker, manager.free_for_forward, manager.abort_load, models.get_weights
    )
    scheduler = Scheduler(forwards, lambda: models.loaded, prefix_cache, scheduler_limits)
    beginnings = BeginningStore(prefixes, prefix_memory)
    embeddings = EmbeddingScheduler(embedding_table, forwards, scheduler, beginnings, mlx.prefill_step_size, floor)
    sweeps = SweepQueue(
        running=running_sweep,
        profiler=profiler,
        forwards=forwards,
        loaded_models=lambda: models.loaded,
        is_loading=manager.is_loading,
        synchronize=scheduler.synchronize,
        describe=lambda loaded_model: describer.describe_measured(
            loaded_model.descriptor, memory.read_now(), time.monotonic()
        ),
    )
    admission = RequestAdmission(
        table=models,
        catalogue=catalogue,
        manager=manager,
        describer=describer,
        waiting=waiting,
        scheduler=scheduler,
        forwards=forwards,
        wiring=wiring,
        limits=limits,
        embeddings=embedding_table,
        beginnings=beginnings,
        floor=floor,
    )
    commands = ModelCommands(
        table=models,
        catalogue=catalogue,
        manager=manager,
        unloader=unloader,
        blocks=blocks,
        cause=find_cause,
        sweeps=sweeps,
        admission=admission,
        waiting=waiting,
        scheduler=scheduler,
        forwards=forwards,
        wiring=wiring,
    )
    request_preloads(settings.models.preload, catalogue, manager)
    return TextEngine(
        EngineParts(
            catalogue=catalogue,
            preparer=preparer,
            footprint=footprint,
            memory=memory,
            forwards=forwards,
            wiring=wiring,
            prefix_cache=prefix_cache,
            emergency_reserve=reserve,
            models=models,
            unloader=unloader,
            model_manager=manager,
            times=times,
            describer=describer,
            waiting=waiting,
            scheduler=scheduler,
            admission=admission,
            commands=commands,
            sweeps=sweeps,
            embedding_preparer=EmbeddingPreparer(catalogue, preparer, limits.get_max_row_tokens, recorder),
            embedding_table=embedding_table,
            embeddings=embeddings,
        )
    )


def open_disk_cache(folder: Path | None, size: str | int, min_seconds: float) -> DiskCache | None:
    """Return the disk cache in `folder`; None without a folder, if the size is `off`, or if the folder cannot be used.

    `size` and `min_seconds` are the settings `disk_cache_size` and `disk_cache_min_seconds`. A folder that cannot be
    used is logged. Raise `ValueError` for a size that cannot be parsed.
    """
    if folder is None or size == "off":
        return None
    try:
        return DiskCache(folder, size if size == "auto" else parse_size(size), min_seconds)
    except OSError as error:
        log.exception("no disk cache", folder=str(folder), error=str(error))
        return None


def request_preloads(names: tuple[str, ...], catalogue: ModelCatalogue, manager: ModelManager) -> None:
    """Queue the load of each model in `names`. Log an error for a name that no model folder has."""
    for name in names:
        found = catalogue.find(name)
        if found is None:
            log.error("preload", model=name, cause="no such model in the folders")
        else:
            manager.request_load(found)
