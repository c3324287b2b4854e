"""Compiles grammars that somebody sent, to see whether they can be: in a process of its own, which may be killed.

Some patterns take llguidance hours, and nothing in a process can end a native call. So a timer of the kernel's ends the
process at the first grammar that takes too much CPU. Run as a file, with nothing of this project:

    python -I sandbox_main.py SECONDS      u32 length | grammar ─► u32 length | why not, empty where nothing is wrong
"""

import signal
import sys
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""llguidance's own limits, for whoever compiles. A state of a lexer takes 1 to 2 kB: one row may take 40 MB of them.
Fuel for a step lasts 14 ms, items 3 ms. Large lexemes are not computed ahead: that takes longer than all else."""


def answer(source: BinaryIO, sink: BinaryIO, seconds: float) -> None:
    """Vet one grammar after the other until there are no more. Single bytes stand for a model's tokens: what takes long
    does so with any vocabulary."""
    tokenizer = LLTokenizer("byte")
    while head := source.read(4):
        text = source.read(int.from_bytes(head)).decode()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        wrong = why_not(LLMatcher(tokenizer, text, log_level=0, limits=LIMITS))
        signal.setitimer(signal.ITIMER_PROF, 0)
        said = wrong[:2000].encode(errors="replace")
        sink.write(len(said).to_bytes(4) + said)
        sink.flush()


def why_not(matcher: LLMatcher) -> str:
    """Say why a grammar leads nowhere, at its beginning; nothing if it goes on."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    wrong = matcher.get_error()
    return "nothing can be written that it allows" if wrong.startswith("NoExtension") else wrong


if __name__ == "__main__":
    answer(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
