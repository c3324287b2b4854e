"""Answers of gpt-oss under a grammar: reasoning, then the requested text or a call, and nothing else."""

import json
import random

import pytest

from node.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from node.engine.grammar.matcher import GrammarFailed
from node.engine.grammar.tool_spec import UnsupportedSchema
from node.engine.text import harmony, tokenizer_loader
from node.engine.text.tokenizer import TokenizedPrompt, Tokenizer
from tests.support.engine import vocabulary
from wire.frames import CallConstraint, Channel, Generate, GenerationParams, GrammarKind, GrammarSpec, Message

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "<|end|>"]}}, "required": ["city"]}
SCHEMA = json.dumps({**CITY, "additionalProperties": False})
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}},
        {
            "type": "function",
            "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
        },
    ]
)
FORMAT = GrammarSpec(GrammarKind.JSON_SCHEMA, SCHEMA)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{# <|channel|>analysis<|message|> #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>Hm, <end>?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
WEATHER, NOW = CALL.format("get_weather"), CALL.format("now")
STEPS = 400
"""Maximum tokens of a drawn answer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = vocabulary.byte_level(tmp_path_factory.mktemp("oss"), tokens=(*harmony.TOKENS, harmony.CONSTRAIN))
    return tokenizer_loader.load(vocabulary.configure(folder, chat_template=TEMPLATE, eos_token="<|return|>"))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler()


def render(model: Tokenizer, *messages: Message) -> TokenizedPrompt:
    """Return the tokens of a conversation. The answer continues a last message of the assistant."""
    template = '{"continue_final_message": true}' if messages[-1].role == "assistant" else ""
    return model.tokenize_request(Generate(1, 1, "r1", "m", messages, GenerationParams(), 0, template=template))


def build(model: Tokenizer, compiler: GrammarCompiler, spec: GrammarSpec, *messages: Message) -> CompiledGrammar:
    """Return the grammar of the answer to a conversation, by default to one message of a user."""
    prompt = render(model, *(messages or (Message("user", "Hi"),)))
    return compiler.compile(model, spec, TOOLS, prompt, one_call=False)


def is_answer(model: Tokenizer, grammar: CompiledGrammar, text: str, end: str = "<|return|>") -> bool:
    """Return whether the grammar allows a text, token by token, and then the end of the answer."""
    cursor = grammar.create_cursor()
    for token in model.encode(text + end, plain=False):
        mask = cursor.compute_mask()
        if mask is None or not mask[token // 8] >> token % 8 & 1:
            return False
        cursor.feed(token)
    return cursor.compute_mask() is None


def read(model: Tokenizer, grammar: CompiledGrammar, ids: tuple[int, ...]) -> tuple[str, str, list[tuple[str, object]]]:
    """Return reasoning, content and calls of an answer."""
    made = model.create_pipeline("r", 0, (), TOOLS, False, grammar=grammar)
    pieces = [piece for token in ids for piece in made.feed(token).pieces]
    pieces += made.finish("stop")[0]
    calls = [json.loads(text) for channel, text in pieces if channel is Channel.TOOL_CALL]
    reasoning, content = (
        "".join(text for channel, text in pieces if channel is wanted)
        for wanted in (Channel.REASONING, Channel.CONTENT)
    )
    return reasoning, content, [(call["name"], json.loads(call["arguments"])) for call in calls]


OSLO = '{"city": "Oslo"}'
ONLY_FORMAT = {FINAL + OSLO}
ONLY_CALLS = {WEATHER + OSLO, NOW + "{}"}


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        (FORMAT, ONLY_FORMAT),
        (GrammarSpec(GrammarKind.JSON_OBJECT), {FINAL + OSLO, FINAL + '{"a": 1}'}),
        (GrammarSpec(GrammarKind.REGEX, "[a-c]+"), {FINAL + "abc"}),
        (GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]'), {FINAL + "yes"}),
        (GrammarSpec(GrammarKind.LARK, 'start: "yes" | "abc"'), {FINAL + "yes", FINAL + "abc"}),
        (GrammarSpec(calls=CallConstraint.REQUIRED), ONLY_CALLS),
        (GrammarSpec(calls=CallConstraint.REQUIRED, tool="now"), {NOW + "{}"}),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, SCHEMA, calls=CallConstraint.REQUIRED), ONLY_CALLS),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, SCHEMA, calls=CallConstraint.FREE), ONLY_FORMAT | ONLY_CALLS),
        (
            GrammarSpec(calls=CallConstraint.FREE),
            {FINAL + text for text in ("abc", "yes", "It rains.", OSLO, '{"a": 1}')} | ONLY_CALLS,
        ),
    ],
)
def test_render_harmony_answer_allows_exactly_the_requested_answers(
    model: Tokenizer, compiler: GrammarCompiler, spec: GrammarSpec, allowed: set[str]
):
    grammar = build(model, compiler, spec)
    texts = [FINAL + text for text in ("abc", "yes", "It rains.", OSLO, '{"a": 1}')]
    messages = [*texts, WEATHER + OSLO, WEATHER + "{}", NOW + "{}", CALL.format("other") + "{}", "{}", OSLO]
    messages.append("<|channel|>commentary<|message|>One moment.")
    assert {text for text in messages if is_answer(model, grammar, text)} == allowed
    assert {text for text in messages if is_answer(model, grammar, THOUGHT + text)} == allowed
    assert not is_answer(model, grammar, THOUGHT)
    assert not is_answer(model, grammar, THOUGHT + THOUGHT + next(iter(allowed)))
    assert not is_answer(model, grammar, next(iter(allowed)) + "<|end|><|start|>assistant" + next(iter(allowed)))


@pytest.mark.parametrize("end", harmony.ENDS)
def test_a_constrained_answer_is_split_into_its_channels(model: Tokenizer, compiler: GrammarCompiler, end: str):
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, SCHEMA, calls=CallConstraint.FREE)
    grammar = build(model, compiler, spec)
    texts = {
        FINAL + OSLO: ("", OSLO, []),
        THOUGHT + FINAL + OSLO: ("Hm, <end>?", OSLO, []),
        THOUGHT + WEATHER + OSLO: ("Hm, <end>?", "", [("get_weather", {"city": "Oslo"})]),
        NOW + "{}": ("", "", [("now", {})]),
    }
    for text, expected in texts.items():
        assert is_answer(model, grammar, text, end)
        assert read(model, grammar, model.encode(text + end, plain=False)) == expected


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_answer_follows_its_schema_also_with_markers_as_text(
    model: Tokenizer, compiler: GrammarCompiler, seed: int
):
    """Draw allowed tokens at random. Every answer that ends has the text or the call of the schema, even where it
    contains the text of a marker in other tokens."""
    chance = random.Random(seed)
    grammar = build(model, compiler, GrammarSpec(GrammarKind.JSON_SCHEMA, SCHEMA, calls=CallConstraint.FREE))
    cursor, ids = grammar.create_cursor(), list[int]()
    ends = model.encode("<|end|>", plain=False)
    while (mask := cursor.compute_mask()) is not None and len(ids) < STEPS:
        allowed = [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]
        ended = [token for token in allowed if token in model.eos or (token in ends and chance.random() < 0.2)]
        ids.append(chance.choice(ended or allowed))
        cursor.feed(ids[-1])
    _, content, calls = read(model, grammar, tuple(ids))
    assert cursor.compute_mask() is None
    if calls:
        assert (content, len(calls)) == ("", 1)
        assert calls[0][0] == "now" or calls[0] in [("get_weather", {"city": city}) for city in ("Oslo", "<|end|>")]
    else:
        assert json.loads(content)["city"] in ("Oslo", "<|end|>")


def test_an_answer_that_has_begun_continues_in_its_format_and_has_no_calls(model: Tokenizer, compiler: GrammarCompiler):
    begun = Message("user", "Hi"), Message("assistant", "Sure: ")
    assert not model.has_message_answer(render(model, *begun))
    grammar = build(model, compiler, FORMAT, *begun)
    assert is_answer(model, grammar, OSLO)
    assert read(model, grammar, model.encode(OSLO, plain=False)) == ("", OSLO, [])
    with pytest.raises(GrammarFailed):
        grammar.create_cursor().feed(model.encode(FINAL, plain=False)[0])
    with pytest.raises(UnsupportedSchema, match="cannot be enforced: leave strict out and use tool_choice auto"):
        build(model, compiler, GrammarSpec(calls=CallConstraint.REQUIRED), *begun)


def test_the_model_reports_that_its_answers_can_follow_a_grammar(model: Tokenizer):
    assert model.constrainable
    assert model.has_message_answer(render(model, Message("user", "Hi")))
