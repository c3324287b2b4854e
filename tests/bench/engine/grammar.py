"""CPU time of a grammar: `python -m tests.bench.engine.grammar`.

Prints milliseconds as JSON. `steps` has the CPU time of computing and applying a mask, one list a round, at 151,936
tokens made of the words in Python's library. `refusals` has the time of a refusal by the name of its grammar, the best
of three while the vetting process is running.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from node.engine.grammar.compiler import GrammarCompiler
from node.engine.grammar.logits_mask import apply_mask
from node.engine.grammar.sandbox_main import LIMITS
from node.engine.grammar.tool_spec import UnsupportedSchema
from node.engine.text.token_bytes import BYTES
from node.engine.text.tokenizer import TokenizedPrompt
from node.engine.text.tokenizer_loader import load
from tests import models
from wire.frames import GrammarSpec

VOCABULARY, ROUNDS = 151_936, 5
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "maxItems": 3},
        "text": {"type": "string"},
        "mail": {"type": "string", "format": "email"},
    },
    "required": ["name", "age", "tags", "text", "mail"],
    "additionalProperties": False,
}
ANSWER = (
    '{"name": "Ada Lovelace", "age": 36, "tags": ["alpha", "beta"], "text": "Many words, and \\"quotes\\" in them.", '
    '"mail": "ada@example.com"}'
)
_PATTERNS = [f".*a.{{{count}}}b.*" for count in range(30)]
_PROPERTIES = {f"p{number}": {} for number in range(9_000)}
HOSTILE = {
    "a megabyte": GrammarSpec("json_schema", json.dumps({"enum": ["x" * 1_000_000]})),
    "12,000 levels": GrammarSpec("json_schema", '{"items":' * 12_000 + "{}" + "}" * 12_000),
    "9,000 properties": GrammarSpec("json_schema", json.dumps({"type": "object", "properties": _PROPERTIES})),
    "a remote reference": GrammarSpec("json_schema", '{"$ref": "http://127.0.0.1:1/x.json"}'),
    "itself": GrammarSpec("json_schema", '{"$ref": "#"}'),
    "patterns that meet": GrammarSpec("json_schema", json.dumps({"allOf": [{"pattern": one} for one in _PATTERNS]})),
    "repeated repetitions": GrammarSpec("regex", "(((((a{10}){10}){10}){10}){10}){100}"),
    "deep Lark": GrammarSpec("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
}


def _words() -> Iterator[bytes]:
    """Yield the prefixes of every word in Python's library, the shortest of each word first."""
    for file in sorted(Path(json.__file__).parents[1].rglob("*.py")):
        for word in re.findall(rb" ?\w+|\s+|[^\w\s]+", file.read_bytes()):
            yield from (word[:length] for length in range(2, min(len(word), 16) + 1))


def tokenizer() -> LLTokenizer:
    """Make a tokenizer of bytes and words, whose last token ends an answer."""
    signs = {byte: sign for sign, byte in BYTES.items()}
    entries = {byte: at for at, byte in enumerate(signs)}
    words = _words()
    while len(entries) < VOCABULARY - 1:
        entries.setdefault(next(words), len(entries))
    spelled = {"".join(signs[bytes([byte])] for byte in word): at for word, at in entries.items()}
    made = Tokenizer(BPE(vocab=spelled, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return LLTokenizer(made.to_str(), n_vocab=VOCABULARY, eos_token=VOCABULARY - 1)


def steps() -> list[list[float]]:
    """Walk through an answer; return the milliseconds of each step."""
    guide, logits = tokenizer(), mx.random.normal((1, VOCABULARY))
    ids = [*guide.tokenize_str(ANSWER), VOCABULARY - 1]
    found: list[list[float]] = []
    for _ in range(ROUNDS):
        matcher = LLMatcher(guide, LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)), limits=LIMITS)
        times: list[float] = []
        for token in ids:
            begun = time.process_time()
            mx.eval(apply_mask(logits, matcher.compute_bitmask()))
            times.append((time.process_time() - begun) * 1e3)
            assert matcher.consume_token(token), matcher.get_error()
        found.append(times)
    return found


def refusals() -> dict[str, float]:
    """Return the milliseconds until each hostile grammar is refused."""
    model, found = load(models.EMBEDDED), dict[str, float]()
    for name, asked in [*HOSTILE.items()] * 3:
        grammars = GrammarCompiler()
        grammars.compile(
            model, GrammarSpec("regex", f"[{len(found)}]"), "", TokenizedPrompt((1,), thinking=False), one_call=False
        )
        begun = time.perf_counter()
        try:
            grammars.compile(model, asked, "", TokenizedPrompt((1,), thinking=False), one_call=False)
        except UnsupportedSchema:
            found[name] = min(found.get(name, 1e9), (time.perf_counter() - begun) * 1e3)
    return found


if __name__ == "__main__":
    print(json.dumps({"steps": steps(), "refusals": refusals()}))
