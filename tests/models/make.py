"""Make a tiny model that mlx_lm loads, without any network: `python -m tests.models.make OUT --arch llama`.

A trained model answers every prompt of its answers.json verbatim; a random model (`--random`) only has the shape. The
model in node/models/macpool-tiny is also made by this command (`--patient`). Training takes half a minute of one core
if OpenBLAS replaces the BLAS that MLX brings (`LD_PRELOAD=libopenblas.so.0`), and far longer otherwise.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from tests.models.architectures import ARCHITECTURES, PRESETS, config
from tests.models.conversations import ENTRIES, Conversation, topics
from tests.models.tokenizer import END, MARKERS, make_tokenizer
from tests.models.training import PATIENT, QUICK, Lesson, Plan, train

WEIGHTS = "model.safetensors"


def answers() -> str:
    """Return the text of answers.json."""
    return json.dumps([entry.as_json() for entry in ENTRIES], indent=1, ensure_ascii=False) + "\n"


def lesson(tokenizer: TokenizerWrapper, conversation: Conversation) -> Lesson:
    """Return a conversation's tokens as on a server: the templated prompt, followed by the generated reply.

    Raise ValueError if the template writes the prompt differently once a reply follows.
    """
    before, tools = conversation.messages[:-1], list(conversation.tools) or None
    prompt = _render(tokenizer, before, tools, asking=True)
    whole = _render(tokenizer, conversation.messages, tools, asking=False)
    if not whole.startswith(prompt):
        raise ValueError(f"the template changes what went before a reply: {prompt!r}")
    reply = whole[len(prompt) :]
    if not conversation.thinking:
        prompt = _render(tokenizer, before, tools, asking=True, thinking=False)
    return Lesson(_encode(tokenizer, prompt), _encode(tokenizer, reply))


def _render(tokenizer: TokenizerWrapper, messages: Any, tools: Any, *, asking: bool, thinking: bool = True) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=asking, enable_thinking=thinking
    )


def _encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def make(folder: Path, architecture: str, *, preset: str, plan: Plan | None, seed: int) -> None:
    """Make a model in an existing folder, random without a plan; raise RuntimeError when training fails."""
    began = time.perf_counter()
    tokenizer = make_tokenizer(folder, PRESETS[preset].vocabulary)
    end = tokenizer.token_to_id(END)
    assert end is not None
    settings = config(architecture, preset, end)
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "generation_config.json").write_text('{"do_sample": false}\n')
    mx.random.seed(seed)
    (folder / WEIGHTS).unlink(missing_ok=True)
    model, _ = load_model(folder, strict=False)  # not strict: there are no weights yet, and MLX draws random ones
    if plan:
        _teach(folder, model, dataclasses.replace(plan, seed=seed))
    weights = dict(tree_flatten(model.parameters()))
    if not plan:
        _silence(tokenizer, weights)
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})
    size = os.path.getsize(folder / WEIGHTS)
    count = sum(weight.size for weight in weights.values())
    print(f"{architecture}: {count:,} weights, {size:,} bytes, {time.perf_counter() - began:.0f} s", flush=True)


def _silence(tokenizer: Tokenizer, weights: dict[str, mx.array]) -> None:
    """Set the embeddings of tokens that are no text of their own to 0, in place.

    The embeddings, or those of a separate output layer, are also the weights of the logits. A random model then
    generates no such token in a greedy answer. A server would hold back the text of an answer that repeats one byte of
    a letter.
    """
    mute = [
        number
        for number in range(tokenizer.get_vocab_size())
        if (text := tokenizer.decode([number])) in ("", *MARKERS) or "\ufffd" in text
    ]
    for name in weights:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weights[name][mx.array(mute)] = 0


def _teach(folder: Path, model: Any, plan: Plan) -> None:
    tokenizer = load_tokenizer(folder)
    lessons = [[lesson(tokenizer, conversation) for conversation in topic] for topic in topics()]
    outcome = train(model, lessons, plan, lambda line: print(line, flush=True))
    if outcome.wrong:
        raise RuntimeError(f"{outcome.wrong} conversations are not known after {outcome.steps} steps")
    (folder / "answers.json").write_text(answers())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and make the model."""
    parser = argparse.ArgumentParser(description="Make a tiny model that mlx_lm loads.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--random", action="store_true", help="do not train")
    parser.add_argument("--patient", action="store_true", help="train longer: right in later turns as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", nargs="+", choices=ARCHITECTURES, help="make OUT/ARCHITECTURE for each of these")
    chosen = parser.parse_args(arguments)
    plan = None if chosen.random else PATIENT if chosen.patient else QUICK
    folders = {arch: chosen.out / arch for arch in chosen.each} if chosen.each else {chosen.arch: chosen.out}
    for arch, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, arch, preset=chosen.preset, plan=plan, seed=chosen.seed)


if __name__ == "__main__":
    main()
