"""Grammar of a whole answer in Harmony, the format of gpt-oss (`node.engine.text.harmony`).

    start      reasoning? message
    reasoning  <|channel|>analysis<|message|> … <|end|><|start|>assistant
    message    <|channel|>final<|message|> …                                              the answer
             | <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}    a call

The prompt ends before the first channel. The end of a message ends the answer, which therefore has one call at most.
Text for the user before a call, on the channel `commentary`, is not allowed.
"""

import json
from collections.abc import Sequence

from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.tool_spec import ToolSpec
from node.engine.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, RECIPIENT, START


def render_harmony_answer(builder: LarkBuilder, tools: Sequence[ToolSpec], answer: str) -> str:
    """Return the Lark rules of an answer that is either a call of one of `tools` or text.

    `answer` is the Lark expression of the text, such as `@answer`, or `WORDS` for any text; empty if only calls are
    allowed. The schemas of the tools are added to `builder`. Raise `UnsupportedSchema` if the schemas exceed the limits
    of the builder.
    """
    channel, message, start, constrain = map(builder.render_literal, (CHANNEL, MESSAGE, START, CONSTRAIN))
    messages = [f'{channel} "final" {message} {answer}'] if answer else []
    if tools:
        called = " | ".join(
            f'{json.dumps(f"{tool.name} ")} {constrain} "json" {message} {builder.add_schema(tool.schema)}'
            for tool in tools
        )
        messages.append(f"{channel} {json.dumps(f'commentary{RECIPIENT}')} ({called})")
    end, is_token = builder.call_format.render_literal(END)
    return (
        f'start: reasoning? message\nreasoning: {channel} "analysis" {message} thought {start} "assistant"\n'
        f"thought{'' if is_token else '[lazy]'}: WORDS {end}\nmessage: {' | '.join(messages)}\nWORDS: /(.|\\n)*/\n"
    )
