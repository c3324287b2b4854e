"""Small tokenizers in the form of a model's folder, written in milliseconds."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from node.engine.text.token_bytes import BYTES

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|end|>"
_SIGNS = {byte[0]: sign for sign, byte in BYTES.items()}


def byte_level(folder: Path, texts: Iterable[str] = (), tokens: Iterable[str] = (), size: int = 400) -> Path:
    """Write a byte-level BPE tokenizer: a token for every byte, merges that are frequent in the texts, and the special
    tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END, *tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _written(folder, tokenizer)


def pieces_with_byte_fallback(folder: Path) -> Path:
    """Write a tokenizer like SentencePiece: words with a mark for their blank, and bytes for the rest."""
    words = ["<unk>", "</s>", "▁", "▁hello", "▁world", *(f"<0x{byte:02X}>" for byte in range(256)), *"helowrd"]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _written(folder, tokenizer, eos_token="</s>")


def words_only(folder: Path, words: Iterable[str]) -> Path:
    """Write a tokenizer that knows only whole words and raises at any other word."""
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["a", ",", "b", *words])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _written(folder, tokenizer, eos_token="a")


def configure(folder: Path, **entries: object) -> Path:
    """Change entries of the tokenizer's configuration; None removes one."""
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: entry for name, entry in config.items() if entry is not None}))
    return folder


def byte_ids(vocabulary: dict[str, int], text: str) -> list[int]:
    """Return a text as one token for each byte."""
    return [vocabulary[_SIGNS[byte]] for byte in text.encode()]


def _written(folder: Path, tokenizer: Tokenizer, eos_token: str = END) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token, "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
