"""The byte-level tokenizer of the tiny models, with the chat template in its configuration."""

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.models.conversations import ENTRIES, TOOL_USES

END = "<|im_end|>"
SPECIALS = ("<|endoftext|>", "<|im_start|>", END)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Also single tokens, but not special: they are part of an answer's text."""
WEIGHT = 20
"""Number of repetitions of the conversations, against half a megabyte of the Python manual."""


def _texts() -> Iterator[str]:
    """Yield the manual that every Python brings, and the ASCII texts. Other scripts stay out, and their letters are
    split."""
    yield from (topics[name] for name in sorted(topics))
    spoken = [text for entry in ENTRIES for text in (entry.prompt, entry.answer, entry.reasoning)]
    spoken += [text for use in TOOL_USES for text in (use.prompt, use.answer, json.dumps(dict(use.calls)))]
    yield from [text for text in spoken if text.isascii()] * WEIGHT


def _settings(template: str) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": SPECIALS[0],
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def make_tokenizer(folder: Path, vocabulary: int) -> Tokenizer:
    """Train a tokenizer of `vocabulary` entries and write tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens(list(MARKERS))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (Path(__file__).parent / "template.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(_settings(template), indent=1) + "\n")
    return tokenizer
