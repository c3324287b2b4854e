"""Chat templates alone: the messages that a template gets, and the requests that no template can render."""

import json
from pathlib import Path

import pytest

from node.engine.text import chat_template, tokenizer_loader
from node.engine.text.chat_template import (
    SHORT_ID_CHARS,
    ChatTemplate,
    convert_developer_messages,
    has_instructions,
    join_opening,
    parse_tools,
    shorten_call_ids,
    simplify_turns,
)
from node.engine.text.harmony import ANALYSIS
from node.engine.text.time_limit import DeadlineError
from node.engine.text.tokenizer_errors import TemplateFailed
from tests.support.engine import vocabulary
from tests.unit.node.engine.text.test_tokenizer import ask
from wire.frames import Message, ToolCall

SHOWN = "{{ messages | tojson }}"
CALL = ToolCall("c1", "look", '{"at": "x"}')


def load_template(folder: Path, template: str | None, **entries: object) -> ChatTemplate:
    written = vocabulary.byte_level(folder / "model")
    return ChatTemplate(tokenizer_loader.load(vocabulary.configure(written, chat_template=template, **entries)).wrapper)


def pairs(*messages: str) -> list[Message]:
    """Return messages, each written as its role, an equals sign and its text."""
    return [Message(role, content) for role, _, content in (message.partition("=") for message in messages)]


def test_a_template_gets_the_fields_of_a_message_that_are_not_empty(tmp_path: Path):
    template = load_template(tmp_path, SHOWN)
    message = Message("assistant", "hi", "me", (CALL,), reasoning="hm")
    result = Message("tool", "sun", tool_call_id="c1")
    first, *others = json.loads(template.render(ask(message, result, Message("user"))))
    first.pop("thinking", None)  # transformers adds other names of the reasoning
    assert [first, *others] == [
        {
            "role": "assistant",
            "content": "hi",
            "name": "me",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}},
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("written", "given"),
    [("", {}), ("{}", {}), ('{"a": [1]}', {"a": [1]}), ("[1]", "[1]"), ("1", "1"), ("{a", "{a"), ('"a"', '"a"')],
)
def test_arguments_are_an_object_or_stay_as_written(tmp_path: Path, written: str, given: object):
    template = load_template(tmp_path, SHOWN)
    (message,) = json.loads(template.render(ask(Message("assistant", tool_calls=(ToolCall("c1", "look", written),)))))
    assert message["tool_calls"][0]["function"]["arguments"] == given


def test_a_renderer_in_python_gets_empty_arguments_as_an_object(tmp_path: Path):
    template = load_template(tmp_path, None, chat_template_type="deepseek_v32")
    call = Message("assistant", tool_calls=(ToolCall("c1", "look", ""),))
    assert "look" in template.render(ask(Message("user", "a"), call, Message("tool", "b", tool_call_id="c1")))


@pytest.mark.parametrize(("suffix", "given"), [("", ["hm", "hm", "hm"]), (f"{{# {ANALYSIS} #}}", [None, "hm", "hm"])])
def test_reasoning_is_left_out_where_the_template_takes_no_call_with_reasoning_and_content(
    tmp_path: Path, suffix: str, given: list[str | None]
):
    template = load_template(tmp_path, SHOWN + suffix)
    messages = [
        Message("assistant", "a", tool_calls=(CALL,), reasoning="hm"),
        Message("assistant", "", tool_calls=(CALL,), reasoning="hm"),
        Message("assistant", "a", reasoning="hm"),
    ]
    found = json.loads(template.render(ask(*messages)))
    assert [message.get("reasoning_content") for message in found] == given
    assert [message["content"] for message in found] == ["a", "", "a"]


def test_a_model_without_a_template_renders_nothing(tmp_path: Path):
    with pytest.raises(TemplateFailed, match="the model has no chat template"):
        load_template(tmp_path, None).render(ask())


@pytest.mark.parametrize(
    ("tools", "variables", "reason"),
    [
        ("{}", "", "the tools are not a JSON array"),
        ("", "[]", "the template's variables are not a JSON object"),
        ("", '{"tools": [], "messages": []}', "a template variable cannot be called messages, tools"),
    ],
)
def test_tools_are_an_array_and_variables_an_object(tmp_path: Path, tools: str, variables: str, reason: str):
    with pytest.raises(TemplateFailed, match=reason):
        load_template(tmp_path, SHOWN).render(ask(tools=tools, template=variables))


def test_tools_are_parsed_from_json():
    assert (parse_tools(""), parse_tools("[]"), parse_tools('[{"a": 1}]')) == ([], [], [{"a": 1}])
    for text in ("1", '"a"', "{}", "null"):
        with pytest.raises(TemplateFailed):
            parse_tools(text)


def test_a_template_that_takes_too_long_is_not_tried_with_other_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT_SECONDS", 0.1)
    endless = (
        "{% if messages|length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    endless += "{% endif %}"
    with pytest.raises(DeadlineError, match="the chat template took more than 0 s"):
        load_template(tmp_path, endless).render(ask(*pairs("user=a", "user=b")))


@pytest.mark.parametrize(
    ("given", "is_known", "found"),
    [
        (["user=a", "system=b"], False, ["user=a", "system=b"]),
        (["system=a", "system=b", "user=c"], False, ["system=a", "system=b", "user=c"]),
        (["developer=a", "user=b"], False, ["system=a", "user=b"]),
        (["developer=a", "system=b", "user=c"], False, ["system=a\n\nb", "user=c"]),
        (["developer=a", "system=b", "user=c"], True, ["developer=a\n\nb", "user=c"]),
        (["system=a", "system=b", "user=c", "developer=d"], False, ["system=a", "system=b", "user=c", "system=d"]),
        (["system=a", "user=b", "developer=c"], True, ["system=a", "user=b", "developer=c"]),
    ],
)
def test_developer_messages_become_system_messages(given: list[str], is_known: bool, found: list[str]):
    assert list(convert_developer_messages(pairs(*given), is_known=is_known)) == pairs(*found)


@pytest.mark.parametrize(
    ("given", "joined", "simple"),
    [
        (["user=a"], ["user=a"], ["user=a"]),
        (["system=a"], ["system=a"], ["system=a"]),
        (["system=a", "developer=b"], ["system=a\n\nb"], ["system=a\n\nb"]),
        (["user=a", "system=b", "system=c"], ["user=a", "system=b", "system=c"], ["user=a\n\nb\n\nc"]),
        (["system=a", "user=b", "developer=c"], ["system=a", "user=b", "developer=c"], ["system=a", "user=b\n\nc"]),
        (
            ["user=a", "assistant=b", "assistant=c", "system=d", "user=e"],
            ["user=a", "assistant=b", "assistant=c", "system=d", "user=e"],
            ["user=a", "assistant=b", "assistant=c", "user=d\n\ne"],
        ),
        ([], [], []),
    ],
)
def test_turns_are_simplified_for_strict_templates(given: list[str], joined: list[str], simple: list[str]):
    assert list(join_opening(pairs(*given))) == pairs(*joined)
    assert simplify_turns(pairs(*given)) == pairs(*simple)


@pytest.mark.parametrize(
    ("text", "messages", "complete"),
    [
        ("be brief. hello", ["system= be brief. ", "user=bye"], True),
        ("hello", ["system=be brief.", "user=hello"], False),
        ("be brief", ["system=be brief", "developer=be kind"], False),
        ("be brief, be kind", ["system=be brief", "developer=be kind"], True),
        ("", ["user=hello"], True),
    ],
)
def test_only_instructions_must_be_in_the_prompt(text: str, messages: list[str], complete: bool):
    assert has_instructions(text, pairs(*messages)) is complete


@pytest.mark.parametrize("name", ["call_0123", "a1B2c3D4", "a1B2c3D4e5", "ÄÖÜäöüßéè", "a b c d e", ""])
def test_ids_of_another_length_or_other_characters_are_replaced(name: str):
    (call,) = shorten_call_ids(Message("assistant", tool_calls=(ToolCall(name, "look", "{}"),))).tool_calls
    assert len(call.id) == SHORT_ID_CHARS
    assert call.id.isascii()
    assert call.id.isalnum()
    assert (call.id != name, call.name, call.arguments) == (True, "look", "{}")
    result = shorten_call_ids(Message("tool", "sun", tool_call_id=name))
    assert result.tool_call_id == (call.id if name else ""), "a result names its call"


def test_a_valid_id_stays():
    message = Message("assistant", tool_calls=(ToolCall("a1B2c3D4e", "look", "{}"),), tool_call_id="ABCDEFGH9")
    assert shorten_call_ids(message) == message
