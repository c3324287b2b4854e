"""Tokenizers of the engine: each is loaded once, and dropped after its model has left the catalogue."""

import gc
import weakref
from pathlib import Path

from node.engine.requests.preparer import RequestPreparer
from node.models.catalogue import ModelCatalogue
from node.settings import ModelSettings
from tests import models
from tests.support.cluster.engine_pool import link
from wire.frames import Generate, GenerationParams, GrammarSpec, Message

GUIDED = GenerationParams(max_tokens=4, grammar=GrammarSpec("regex", "a+"))


def ask(preparer: RequestPreparer, model: str) -> None:
    """Prepare a request with a grammar, which builds the tables of the tokenizer."""
    prepared = preparer.prepare(Generate(1, 1, "r", model, (Message("user", "Hello!"),), GUIDED, 0))
    assert prepared.refused is None
    assert prepared.grammar is not None


def test_the_tokenizer_of_a_model_that_left_the_catalogue_is_dropped(tmp_path: Path):
    folder = link(tmp_path / "models", gone=models.path("llama"), kept=models.path("qwen3"))
    catalogue = ModelCatalogue(ModelSettings(folders=(str(folder),), use_huggingface_cache=False), {})
    catalogue.scan()
    preparer = RequestPreparer(catalogue)
    for model in ("gone", "kept"):
        ask(preparer, model)
    found = catalogue.get_models()
    kept = preparer.load_tokenizer(found["kept"])
    dropped = weakref.ref(preparer.load_tokenizer(found["gone"]))
    (folder / "gone").unlink()
    link(folder, new=models.path("llama"))
    catalogue.scan()
    ask(preparer, "new")
    gc.collect()
    assert dropped() is None
    assert len(preparer.tokenizers) == 2
    assert preparer.load_tokenizer(found["kept"]) is kept
    ask(preparer, "kept")


def test_the_tokenizer_of_a_loaded_model_is_kept_without_its_files(tmp_path: Path):
    folder = link(tmp_path / "models", loaded=models.path("llama"))
    catalogue = ModelCatalogue(ModelSettings(folders=(str(folder),), use_huggingface_cache=False), {})
    catalogue.scan()
    preparer, loaded = RequestPreparer(catalogue), catalogue.get_models()["loaded"]
    tokenizer = preparer.load_tokenizer(loaded)
    catalogue.pin(loaded)
    (folder / "loaded").unlink()
    link(folder, new=models.path("qwen3"))
    catalogue.scan()
    preparer.load_tokenizer(catalogue.get_models()["new"])
    assert preparer.load_tokenizer(loaded) is tokenizer
