"""Chat template in the files of a model: whether it has reasoning. Its text is searched, and never run."""

from pathlib import Path

from node.models.weight_files import parse_json_object

_THOUGHTS = ("<think>", "<longcat_think>", "<|think:start|>", "<|channel>thought", "<|open|>think<|sep|>")
"""Markers that begin a thought, as mlx-lm knows them."""


def has_reasoning(folder: Path) -> bool:
    """Return whether the chat template of a model can begin a thought.

    The vocabulary does not decide, because variants of a model without reasoning have the same tokens. Return False if
    there is no template or the file is invalid. Raise `OSError` if a file cannot be read.
    """
    template = _read_template(folder)
    return any(marker in template for marker in _THOUGHTS)


def _read_template(folder: Path) -> str:
    own = folder / "chat_template.jinja"
    if own.exists():
        return own.read_text(errors="replace")
    config = folder / "tokenizer_config.json"
    try:
        return str(parse_json_object(config.read_bytes()).get("chat_template", "")) if config.exists() else ""
    except ValueError:
        return ""
