"""Sandbox process: compile grammars of clients to check them, in a process that may be killed.

For some patterns llguidance takes hours, and a process cannot interrupt its own native call. A timer of the kernel
therefore ends the process at the first grammar that takes too much CPU time. The process imports nothing of this
project:

    python -I sandbox_main.py SECONDS      u32 length | grammar ─► u32 length | fault, empty if there is none

    SECONDS is the CPU time for a grammar. Lengths are in bytes and big-endian; texts are UTF-8.
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
"""Limits of llguidance, for this process and for the engine. A state of a lexer takes 1 to 2 kB: the states of one row
may take 40 MB. `step_lexer_fuel` lasts 14 ms, `step_max_items` 3 ms. Large lexemes are not precomputed, because that
takes longer than all other work."""


def check_grammars(source: BinaryIO, sink: BinaryIO, seconds: float) -> None:
    """Read grammars from `source` until its end, and write the fault of each to `sink`, empty if there is none.

    A grammar or fault is preceded by its length in 4 bytes. SIGPROF ends the process if a grammar takes more than
    `seconds` of CPU time. The tokens are single bytes, because slow grammars are slow with any vocabulary.
    """
    tokenizer = LLTokenizer("byte")
    while head := source.read(4):
        text = source.read(int.from_bytes(head)).decode()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        wrong = find_fault(LLMatcher(tokenizer, text, log_level=0, limits=LIMITS))
        signal.setitimer(signal.ITIMER_PROF, 0)
        message = wrong[:2000].encode(errors="replace")
        sink.write(len(message).to_bytes(4) + message)
        sink.flush()


def find_fault(matcher: LLMatcher) -> str:
    """Return the fault of the grammar of `matcher`; empty if it compiles and allows a first token."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    wrong = matcher.get_error()
    return "it allows no text" if wrong.startswith("NoExtension") else wrong


if __name__ == "__main__":
    check_grammars(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
