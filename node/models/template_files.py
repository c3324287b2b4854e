"""Read the chat template of a model, and detect reasoning in its text. The template is never run."""

from pathlib import Path

from node.models.embedding_files import EmbeddingFilesError, read_file, read_object

_THOUGHTS = (
    "<think>",
    "<longcat_think>",
    "<|think:start|>",
    "<|channel>thought",
    "<|open|>think<|sep|>",
    "<|channel|>analysis<|message|>",
)
"""Markers that begin a thought, as mlx-lm and `node.engine.text.harmony` know them."""


def read_template(folder: Path) -> str:
    """Return the text of the chat template in the files of a model; empty if there is none.

    Raise `EmbeddingFilesError` for a file of more than `MAX_FILE_BYTES` bytes or a config that is not a JSON object,
    `OSError` for an unreadable file.
    """
    own = read_file(folder, "chat_template.jinja")
    if own is not None:
        return own.decode(errors="replace")
    return str(read_object(folder, "tokenizer_config.json").get("chat_template", ""))


def has_reasoning(folder: Path) -> bool:
    """Return whether the chat template of a model can begin the reasoning of an answer.

    The vocabulary does not decide, because variants of a model without reasoning have the same tokens. Return False if
    there is no template, or if its file is invalid or too large. Raise `OSError` if a file cannot be read.
    """
    try:
        template = read_template(folder)
    except EmbeddingFilesError:
        return False
    return any(marker in template for marker in _THOUGHTS)
