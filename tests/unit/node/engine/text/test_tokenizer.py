import importlib
import json
import socket
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from node.engine.text import chat_template, tokenizer_loader
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tokenizer_errors import MAX_ERROR_CHARS, TemplateFailed, TokenizerError
from tests.support.engine import vocabulary
from wire.frames import Channel, Generate, GenerationParams, Message, ToolCall

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SHOWN = "{{ {'messages': messages, 'tools': tools, 'extra': extra, 'prompted': add_generation_prompt} | tojson }}"
"""A template that prints its inputs."""
USER = Message("user", "hello")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabulary.byte_level(tmp_path_factory.mktemp("bytes"), ["hello world, hello whirl"] * 9)


@pytest.fixture(scope="session")
def plain(folder: Path) -> Tokenizer:
    return tokenizer_loader.load(folder)


def with_template(tmp_path: Path, template: str | None, tokens: tuple[str, ...] = (), **entries: object) -> Tokenizer:
    written = vocabulary.byte_level(tmp_path / "model", tokens=tokens)
    return tokenizer_loader.load(vocabulary.configure(written, chat_template=template, **entries))


def ask(*messages: Message, tools: str = "", template: str = "", created: int = 0) -> Generate:
    return Generate(1, 1, "r1", "m", messages or (USER,), GenerationParams(), created, tools=tools, template=template)


def text(of: Tokenizer, ids: tuple[int, ...]) -> str:
    return b"".join(map(of.token_bytes, ids)).decode()


def shown(of: Tokenizer, request: Generate) -> dict:
    return json.loads(text(of, of.tokenize_request(request).ids))


# prompts


def test_a_prompt_is_what_the_template_writes(plain: Tokenizer):
    prompt = plain.tokenize_request(ask(Message("system", "be brief"), Message("user", "hello wörld 東京")))
    assert text(plain, prompt.ids) == "<|system|>be brief<|user|>hello wörld 東京<|assistant|>"
    assert prompt.thinking is False


def test_the_template_sees_every_part_of_a_message(tmp_path: Path):
    call = ToolCall("c1", "look", '{"at": ["東京", 1]}')
    messages = (
        Message("user", "hi", name="ann"),
        Message(
            "assistant",
            "",
            tool_calls=(call, ToolCall("c2", "look", "not json"), ToolCall("c3", "now", "")),
            reasoning="hm",
        ),
        Message("tool", "sunny", tool_call_id="c1"),
    )
    given = shown(with_template(tmp_path, SHOWN), ask(*messages, tools=json.dumps(TOOLS), template='{"extra": [1]}'))
    user, assistant, tool = given["messages"]
    assert user == {"role": "user", "content": "hi", "name": "ann"}
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": ["東京", 1]}}},
        {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "not json"}},
        {"id": "c3", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert tool == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    assert (given["tools"], given["extra"], given["prompted"]) == (TOOLS, [1], True)


KNOWS_DEVELOPERS = SHOWN + "{# developer #}"


@pytest.mark.parametrize(
    ("template", "roles", "given"),
    [
        (SHOWN, ["developer", "user"], [("system", "0"), ("user", "1")]),
        (SHOWN, ["system", "developer", "developer", "user"], [("system", "0\n\n1\n\n2"), ("user", "3")]),
        (SHOWN, ["user", "developer", "user"], [("user", "0"), ("system", "1"), ("user", "2")]),
        (SHOWN, ["system", "system", "user"], [("system", "0"), ("system", "1"), ("user", "2")]),
        (KNOWS_DEVELOPERS, ["developer", "user"], [("developer", "0"), ("user", "1")]),
        (KNOWS_DEVELOPERS, ["system", "developer", "user"], [("system", "0\n\n1"), ("user", "2")]),
        (KNOWS_DEVELOPERS, ["user", "developer"], [("user", "0"), ("developer", "1")]),
    ],
)
def test_a_developer_message_reaches_templates_that_know_only_system_messages(
    tmp_path: Path, template: str, roles: list[str], given: list[tuple[str, str]]
):
    messages = [Message(role, str(place)) for place, role in enumerate(roles)]
    found = shown(with_template(tmp_path, template), ask(*messages, template='{"extra": 0}'))["messages"]
    assert [(message["role"], message["content"]) for message in found] == given


STRICT = (
    "{% for message in messages %}"
    "{% if not loop.first and message.role in ('system', loop.previtem.role) %}"
    "{{ raise_exception('the roles must alternate after a system message') }}{% endif %}"
    "{{ message.role }}={{ message.content }}|{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        (["system", "system", "user"], "system=0\n\n1|user=2|"),
        (["system", "user", "user", "assistant"], "system=0|user=1\n\n2|assistant=3|"),
        (["user", "system", "assistant", "system"], "user=0\n\n1|assistant=2|user=3|"),
        (["developer", "user", "developer"], "system=0|user=1\n\n2|"),
    ],
)
def test_a_template_that_raises_for_the_order_of_roles_gets_simple_turns(tmp_path: Path, roles: list[str], prompt: str):
    model = with_template(tmp_path, STRICT)
    messages = [Message(role, str(place)) for place, role in enumerate(roles)]
    assert text(model, model.tokenize_request(ask(*messages)).ids) == prompt
    with pytest.raises(TemplateFailed, match="must alternate"):
        model.tokenize_request(ask(Message("assistant", "a"), Message("assistant", "b")))


DROPS = (
    "{% for message in messages %}{% if loop.first or message.role == 'user' %}"
    "{{ message.role }}={{ message.content | trim }}|{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        (["system", "user", "user"], "system=0|user=1|user=2|"),
        (["system", "user", "system"], "system=0|user=1\n\n 2|"),
        (["system", "system", "user"], "system=0\n\n 1|user=2|"),
    ],
)
def test_a_template_that_leaves_instructions_out_gets_simple_turns(tmp_path: Path, roles: list[str], prompt: str):
    model = with_template(tmp_path, DROPS)
    messages = [Message(role, f" {place}") for place, role in enumerate(roles)]
    assert text(model, model.tokenize_request(ask(*messages)).ids) == prompt


CHECKS_IDS = (
    "{% for message in messages %}{% for id in message.tool_calls | map(attribute='id') | list"
    " + ([message.tool_call_id] if message.tool_call_id else []) %}"
    "{% if id|length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}"
    "{{ id }},{% endfor %}{% endfor %}"
)


def test_the_ids_of_calls_suit_templates_that_check_their_length(tmp_path: Path):
    model = with_template(tmp_path, CHECKS_IDS)
    calls = tuple(
        ToolCall(name, "look", "{}") for name in ("call_0123456789abcdef_0", "call_0123456789abcdef_1", "a1B2c3D4e")
    )
    results = [Message("tool", "seen", tool_call_id=call.id) for call in calls]
    ids = text(model, model.tokenize_request(ask(USER, Message("assistant", tool_calls=calls), *results)).ids)
    first, second, third, *again, _ = ids.split(",")
    assert [first, second, third] == again
    assert (len({first, second, third}), third) == (3, "a1B2c3D4e")
    assert (first + second).isalnum()


def test_without_tools_the_template_is_given_none(tmp_path: Path):
    model = with_template(tmp_path, SHOWN)
    assert [shown(model, ask(tools=tools, template='{"extra": 0}'))["tools"] for tools in ("", "[]")] == [None, None]


def test_an_answer_is_begun_after_a_message_of_the_assistant_too(plain: Tokenizer):
    prompt = plain.tokenize_request(ask(USER, Message("assistant", "hello w")))
    assert text(plain, prompt.ids) == "<|user|>hello<|assistant|>hello w<|assistant|>"


def test_the_last_message_is_continued_on_request(plain: Tokenizer):
    prompt = plain.tokenize_request(
        ask(USER, Message("assistant", "hello w"), template='{"continue_final_message": true}')
    )
    assert text(plain, prompt.ids) == "<|user|>hello<|assistant|>hello w"


def test_a_message_that_is_continued_has_no_end(tmp_path: Path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>{% endfor %}"
    request = ask(USER, Message("assistant", "hello w"), template='{"continue_final_message": true}')
    model = with_template(tmp_path, template)
    assert text(model, model.tokenize_request(request).ids) == "<user>hello</end><assistant>hello w"


def test_tokens_of_a_shared_system_prompt_depend_on_the_date_of_its_template_and_on_its_prompt(tmp_path: Path):
    model = with_template(tmp_path, "{{ strftime_now('%d %b') }}{% for m in messages %}<{{ m.content }}>{% endfor %}")

    def count(created: int, *messages: str) -> int:
        system, *others = (Message("system" if at == 0 else "user", words) for at, words in enumerate(messages))
        request = replace(ask(system, *others, created=created), shared=True)
        shared = model.count_shared_tokens(request, model.tokenize_request(request))
        assert model.count_shared_tokens(replace(request, shared=False), model.tokenize_request(request)) == 0
        return shared

    first = len(model.encode("01 Jan<be brief><", plain=False))
    assert [count(86_400 * day, "be brief", "hello") for day in (0, 1, 0)] == [first] * 3
    request = replace(ask(Message("system", "be brief"), USER), shared=True)
    other = model.tokenize_request(ask(Message("system", "be long"), USER))
    assert model.count_shared_tokens(request, other) == 0


@pytest.mark.parametrize("name", sorted(chat_template.RESERVED))
def test_a_template_variable_cannot_change_the_call(plain: Tokenizer, name: str):
    with pytest.raises(TemplateFailed, match=f"cannot be called {name}"):
        plain.tokenize_request(ask(template=json.dumps({name: False})))


def test_the_clock_is_the_request_s(tmp_path: Path):
    model = with_template(tmp_path, "{{ strftime_now('%d %b %Y %H:%M') }}")
    written = [text(model, model.tokenize_request(ask(created=created)).ids) for created in (0, 86_400 * 365 + 60, 0)]
    assert written == ["01 Jan 1970 00:00", "01 Jan 1971 00:01", "01 Jan 1970 00:00"]


@pytest.mark.parametrize(
    ("ending", "thinking"),
    [("<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("<|assistant|>", False)],
)
def test_a_thought_left_open_is_seen(tmp_path: Path, ending: str, thinking: bool):
    template = "{{ messages[0].content }}<|assistant|>" + ending.replace("\n", "{{ '\\n' }}")
    model = with_template(tmp_path, template, tokens=("<think>", "</think>"))
    assert model.tokenize_request(ask()).thinking is thinking
    assert model.tokenize_request(ask(Message("user", "what is <think>"))).thinking is thinking


def test_a_mark_of_several_tokens_is_seen(tmp_path: Path):
    model = with_template(tmp_path, "hi<|channel>thought{{ '\\n' }}", tokens=("<|channel>", "<channel|>"))
    assert model.tokenize_request(ask()).thinking is True


def test_a_renderer_in_python_is_given_arguments_as_text(tmp_path: Path):
    model = with_template(tmp_path, None, chat_template_type="deepseek_v32")
    call = Message("assistant", tool_calls=(ToolCall("c1", "look", '{"at": "here"}'),))
    prompt = model.tokenize_request(ask(USER, call, Message("tool", "sun", tool_call_id="c1"), tools=json.dumps(TOOLS)))
    assert '<｜DSML｜parameter name="at" string="true">here</｜DSML｜parameter>' in text(model, prompt.ids)


# Failures


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate\nalways') }}", "TemplateError: roles must alternate always"),
        ("{{ messages.nothing.at_all }}", "UndefinedError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{{ raise_exception('x' * 100000) }}", "xxx…"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("", "the chat template rendered an empty prompt"),
        (None, "the model has no chat template"),
    ],
)
def test_a_bad_template_fails_its_request_in_one_line(tmp_path: Path, template: str | None, told: str):
    model = with_template(tmp_path, template)
    for _ in range(2):
        with pytest.raises(TemplateFailed) as failed:
            model.tokenize_request(ask())
        assert told in str(failed.value)
        assert "\n" not in str(failed.value)
        assert len(str(failed.value)) <= MAX_ERROR_CHARS


def test_after_a_request_that_fails_the_next_is_served(tmp_path: Path):
    model = with_template(tmp_path, "{{ raise_exception('no') if messages[0].content == 'bad' else 'fine' }}")
    with pytest.raises(TemplateFailed, match="TemplateError: no"):
        model.tokenize_request(ask(Message("user", "bad")))
    assert text(model, model.tokenize_request(ask()).ids) == "fine"


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (ask(tools="{}"), "tools are not a JSON array"),
        (ask(tools="[1"), "JSONDecodeError"),
        (ask(tools="[1]"), "ValueError: Tools should"),
        (ask(template="[]"), "variables are not a JSON object"),
        (ask(template="[" * 100_000), "RecursionError"),
        (ask(created=1 << 60), "Error"),
    ],
)
def test_a_bad_request_fails_alone(tmp_path: Path, request_: Generate, told: str):
    model = with_template(tmp_path, "{{ strftime_now('%Y') }}{{ tools }}")
    with pytest.raises(TemplateFailed, match=told):
        model.tokenize_request(request_)


def test_a_tokenizer_that_raises_fails_the_request(tmp_path: Path):
    model = tokenizer_loader.load(
        vocabulary.configure(
            vocabulary.words_only(tmp_path / "m", ["hello"]), chat_template="{{ messages[0].content }}"
        )
    )
    assert model.tokenize_request(ask()).ids
    with pytest.raises(TemplateFailed, match="UNK"):
        model.tokenize_request(ask(Message("user", "unheard")))


def test_ids_that_the_model_does_not_have_fail_the_request(folder: Path):
    model = tokenizer_loader.load(folder)
    model.size = 3
    with pytest.raises(TemplateFailed, match=r"token .* is outside the vocabulary of 3 tokens"):
        model.tokenize_request(ask())


# loading


def test_ids_that_end_an_answer_come_from_tokenizer_and_model(tmp_path: Path):
    written = vocabulary.byte_level(tmp_path / "m", tokens=["<|stop|>", "<|other|>"])
    (written / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    assert tokenizer_loader.load(written).eos == {0, 2}
    (written / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    assert tokenizer_loader.load(written).eos == {0, 1}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "attn_temperature_tuning": 4}},
        {
            "model_type": "deepseek_v2",
            "hidden_size": 4.5,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        },
        {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 64, "sliding_window_pattern": "LLLG"},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_config_that_transformers_refuses_loads_its_tokenizer(tmp_path: Path, config: dict[str, object]):
    """mlx-lm reads a number for the first field, and checkpoints of Llama 4 have one."""
    written = vocabulary.byte_level(tmp_path / "m", tokens=["<|stop|>"])
    (written / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    assert tokenizer_loader.load(written).eos == {0, 2}


def test_tools_are_a_feature_where_a_parser_is_known(plain: Tokenizer, tmp_path: Path):
    assert plain.features == ()
    assert with_template(tmp_path, "<tool_call>{{ tool_call.name }}").features == ("tools",)


def test_loading_sends_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert tokenizer_loader.load(folder).size > 256


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path):
    written = vocabulary.byte_level(tmp_path / "evil")
    proof = tmp_path / "ran"
    (written / "own.py").write_text(f"open({str(proof)!r}, 'w')\nclass Own: pass\n")
    vocabulary.configure(written, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(TokenizerError, match=r"^evil: its tokenizer needs code from the model folder"):
        tokenizer_loader.load(written)
    assert not proof.exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_the_error_of_a_broken_file_omits_its_path(tmp_path: Path, file: str):
    written = vocabulary.byte_level(tmp_path / "broken")
    (written / file).write_text("{")
    with pytest.raises(TokenizerError, match=r"^broken: ") as failed:
        tokenizer_loader.load(written)
    assert str(tmp_path) not in str(failed.value)


def test_the_error_of_a_file_that_cannot_be_read_names_only_the_folder(tmp_path: Path):
    written = vocabulary.byte_level(tmp_path / "model")
    (written / "config.json").unlink(missing_ok=True)
    (written / "config.json").mkdir()
    with pytest.raises(TokenizerError, match=r"model/config\.json") as error:
        tokenizer_loader.load(written)
    assert str(tmp_path) not in str(error.value)


def test_a_missing_folder_is_a_tokenizer_error(tmp_path: Path):
    with pytest.raises(TokenizerError, match="nowhere: the folder does not exist"):
        tokenizer_loader.load(tmp_path / "nowhere")


# tokens


@given(st.text(), st.text())
def test_the_bytes_of_tokens_are_the_text(plain: Tokenizer, before: str, after: str):
    written = before + "hello \x00 世界" + after
    ids = plain.tokenize_request(ask(Message("user", written))).ids
    assert b"".join(map(plain.token_bytes, ids)) == f"<|user|>{written}<|assistant|>".encode()


def test_every_byte_has_its_token(plain: Tokenizer):
    found = {plain.token_bytes(token) for token in range(plain.size)}
    assert {bytes([byte]) for byte in range(256)} <= found
    assert vocabulary.END.encode() in found
    assert plain.token_bytes(-1) == plain.token_bytes(plain.size) == b""


def test_pieces_and_byte_tokens_give_their_bytes(tmp_path: Path):
    model = tokenizer_loader.load(vocabulary.pieces_with_byte_fallback(tmp_path / "m"))
    assert [model.token_bytes(token) for token in (1, 3, 5 + 0xC3)] == [b"</s>", b" hello", b"\xc3"]


def test_half_a_character_is_held_back_in_every_kind_of_vocabulary(tmp_path: Path):
    model = tokenizer_loader.load(vocabulary.pieces_with_byte_fallback(tmp_path / "m"))
    pipeline = model.create_pipeline("r", 0, (), "", False)
    assert pipeline.feed(5 + 0xC3).pieces == ()
    assert pipeline.feed(5 + 0xA9).pieces == ((Channel.CONTENT, "é"),)


def test_a_vocabulary_without_a_known_decoder_is_read_too(tmp_path: Path):
    model = tokenizer_loader.load(vocabulary.words_only(tmp_path / "m", ["hello", "world"]))
    pipeline = model.create_pipeline("r", 0, (), "", False)
    given = [piece for token in (3, 4) for piece in pipeline.feed(token).pieces]
    assert "".join(piece for _, piece in [*given, *pipeline.finish("stop")[0]]) == "hello world"
    assert model.token_bytes(3) == b"hello"


# threads


def test_prompts_are_written_while_answers_are_read(plain: Tokenizer):
    words = "hello world 東京 " * 50
    ids = plain.tokenize_request(ask(Message("user", words))).ids
    done = threading.Event()
    prompts: list[tuple[int, ...]] = []

    def render() -> None:
        while not done.is_set():
            prompts.append(plain.tokenize_request(ask(Message("user", words))).ids)

    thread = threading.Thread(target=render)
    thread.start()
    try:
        for _ in range(20):
            one, two = (plain.create_pipeline("r", choice, (), "", False) for choice in (0, 1))
            read = [(one.feed(token).pieces, two.feed(token).pieces) for token in ids]
            assert all(left == right for left, right in read)
            whole = "".join(piece for left, _ in read for _, piece in left)
            assert whole + "".join(piece for _, piece in one.finish("stop")[0]) == f"<|user|>{words}<|assistant|>"
    finally:
        done.set()
        thread.join()
    assert set(prompts) == {ids}


def test_what_mlx_lm_presumes_of_a_model_is_read_without_importing_it():
    module = "mlx_lm.models.muse_spark"
    known = sys.modules.pop(module, None)
    try:
        found = tokenizer_loader.read_defaults("muse_spark")
        assert module not in sys.modules
        assert found is not None
        assert found == importlib.import_module(module).TOKENIZER_DEFAULTS
    finally:
        sys.modules |= {module: known} if known is not None else {}
    for other in ("llama", "mistral", "no_such_model", "../etc", "", None, 7):
        assert tokenizer_loader.read_defaults(other) is None
