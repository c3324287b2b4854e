"""Trial process: load a model's tokenizer and tokenize prompts. Started by `tokenizer_trial`:

    python -P -m node.engine.text.tokenizer_trial_main FOLDER CPU_SECONDS

A timer of CPU time ends the process, even during a native call. A panic of the native tokenizer excludes the model,
because each text that makes a regular expression exceed its limit of steps takes seconds. Other errors of the template
or the tokenizer do not exclude the model, because each of them fails only its own request.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from node.engine.text.tokenizer_errors import TemplateFailed, TokenizerError, TokenizerPanic
from node.engine.text.tokenizer_loader import load
from node.engine.text.tokenizer_trial import EXIT_NOT_LOADED, EXIT_PANICKED
from wire.frames import Generate, GenerationParams, Message

MAX_TEXT_CHARS = 20_000
"""Characters of the longest texts, without their end. They suffice to detect an expression with exponential time."""
PIECES = (
    "a",
    " ",
    "\n",
    "1",
    "!",
    "a ",
    "aA1!",
    "\u00e9",
    "\u6f22",
    "\U0001f44d\U0001f3fd",
    ". ",
    "\t \n",
    "_-",
    "'s ",
    "\r\n",
    "<|",
    "{{",
    "a" * 63 + "!",
)
"""Pieces of which long texts are repetitions, with and without a different end. Expressions of tokenizers match such
texts greedily."""
TOOLS = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]'


def generate_prompts() -> Iterator[Generate]:
    """Yield the prompts of a trial: typical conversations, with and without tools, and long texts."""
    user, model = Message("user", "Hello, how are you?"), Message("assistant", "Fine!")
    for messages in ((user,), (Message("system", "Be brief."), user), (user, model, user), (user, model) * 20):
        for tools in ("", TOOLS):
            yield Generate(1, 1, "trial", "m", messages, GenerationParams(), 0, tools=tools)
    for piece in PIECES:
        for end in ("", "!", "\u00e9"):
            text = (piece * MAX_TEXT_CHARS)[:MAX_TEXT_CHARS] + end
            yield Generate(1, 1, "trial", "m", (Message("user", text),), GenerationParams(), 0)


def main() -> int:
    """Try the model in the folder of the command line.

    Return the exit code: 0, `EXIT_NOT_LOADED` if the tokenizer cannot be loaded, or `EXIT_PANICKED` if it panics. A
    prompt that the template refuses is not a failure. SIGPROF ends the process after the CPU time of the command line.
    """
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        tokenizer = load(folder)
    except TokenizerError:
        return EXIT_NOT_LOADED
    for prompt in generate_prompts():
        try:
            tokenizer.tokenize_request(prompt)
        except TokenizerPanic:
            return EXIT_PANICKED
        except TemplateFailed:
            continue
    return 0


if __name__ == "__main__":
    os._exit(main())  # a regular exit of Python would free each module of transformers, which takes 0.1 s
