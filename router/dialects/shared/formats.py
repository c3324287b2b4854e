"""Answer formats: response formats, grammars and forced tool calls of all dialects.

OpenAI's `response_format` (and `text.format`, and Ollama's `format`), vLLM's `structured_outputs` and its older
`guided_*` fields, and llama.cpp's `json_schema` and `grammar` become one `GrammarSpec` here. A request may use one of
them. Several give a 400 problem that names them. The node validates the content of a schema or a grammar, because only
the node has the model's tokenizer.

`strict: false` is enforced like `strict: true`: an answer that follows its schema is valid in both cases.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from router.admission.request_limits import MAX_GRAMMAR_BYTES, MAX_SCHEMA_CHOICES
from router.dialects.shared.common_fields import SamplingFields, StrictPart, TextFormat, build_type_discriminator
from router.dialects.shared.strict_json import Body, encode_json
from router.errors import Problem, build_invalid
from wire.frames import CallConstraint, GrammarKind, GrammarSpec
from wire.refusals import RefusalCode

FORMS: Mapping[str, str] = MappingProxyType(
    {
        "response_format": "text, json_object and json_schema; the schema is always enforced, also without strict; "
        "json_object may have a schema",
        "structured_outputs": "one of json, regex, choice, grammar (Lark, or short GBNF) and json_object; optionally "
        "whitespace_pattern",
        "guided_json": "same as structured_outputs.json",
        "guided_regex": "same as structured_outputs.regex",
        "guided_choice": "same as structured_outputs.choice",
        "guided_grammar": "same as structured_outputs.grammar",
        "guided_whitespace_pattern": "same as structured_outputs.whitespace_pattern",
        "guided_decoding_backend": "auto, guidance or llguidance",
        "json_schema": "same as structured_outputs.json",
        "grammar": "same as structured_outputs.grammar",
    }
)
"""Notes on the fields of `FormattedBody`, for the manual."""
_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
BACKENDS = ("auto", "guidance", "llguidance")


class JsonObject(StrictPart):
    """Response format `json_object`, for an answer that is any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictPart):
    """JSON schema with its name. Only the schema has an effect."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonObjectWithSchema(JsonObject):
    """Response format `json_object` of a chat body, with a schema as in llama.cpp and other servers of open models."""

    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchema(StrictPart):
    """Response format `json_schema` of a chat body, for an answer that is JSON and follows the schema.

    The schema is in `json_schema`, or in `schema` as with llama.cpp.
    """

    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("text_part")]
    | Annotated[JsonObjectWithSchema, Tag("json_object_part")]
    | Annotated[JsonSchema, Tag("json_schema_part")],
    build_type_discriminator("text", "json_object", "json_schema"),
]


def _get_schema_tag(schema: object) -> str:
    return "written_part" if isinstance(schema, str) else "object_part"


SchemaOrText = Annotated[
    Annotated[dict[str, Any], Tag("object_part")] | Annotated[str, Tag("written_part")], Discriminator(_get_schema_tag)
]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MAX_SCHEMA_CHOICES)
]


class StructuredOutputs(StrictPart):
    """Answer format of vLLM. All fields except `whitespace_pattern` are alternatives."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


class FormattedBody(SamplingFields):
    """Base of the bodies with an answer format, in the fields of OpenAI, llama.cpp, or a newer or older vLLM."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: SchemaOrText | None = None
    grammar: str | None = None

    def build_grammar(self) -> GrammarSpec | Problem | None:
        """Return the grammar of the answer; None if the answer is not constrained.

        Return a 400 problem for an invalid format, several formats, a whitespace pattern without a JSON format, or an
        unsupported `guided_decoding_backend`.
        """
        wrong = check_backend(self.guided_decoding_backend, "guided_decoding_backend")
        if wrong is not None:
            return wrong
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        grammars = convert_structured_outputs(StructuredOutputs.model_validate(guided), "guided_")
        blanks = self.guided_whitespace_pattern
        if self.structured_outputs is not None:
            grammars |= convert_structured_outputs(self.structured_outputs)
            blanks = self.structured_outputs.whitespace_pattern or blanks
        if self.json_schema is not None:
            grammars["json_schema"] = _convert_schema_or_text(self.json_schema, "json_schema")
        if self.grammar:
            grammars["grammar"] = GrammarSpec(GrammarKind.LARK, self.grammar)
        form = convert_response_format(self.response_format)
        return select_single_grammar(grammars if form is None else {**grammars, "response_format": form}, blanks)


def convert_response_format(spec: ResponseFormat | None, name: str = "response_format") -> GrammarSpec | Problem | None:
    """Return the grammar for a response format in OpenAI's format; None if the answer is not constrained.

    `name` is the field of the body, for errors. Return a 400 problem for the type `json_schema` without the member
    `json_schema` or `schema`, and for a schema that `convert_schema` refuses.
    """
    if isinstance(spec, JsonObjectWithSchema):
        return convert_schema(spec.schema_, f"{name}.schema")
    if not isinstance(spec, JsonSchema):
        return None
    if spec.json_schema is not None:
        return convert_schema(spec.json_schema.schema_, f"{name}.json_schema.schema")
    if spec.schema_ is not None:
        return convert_schema(spec.schema_, f"{name}.schema")
    return build_invalid(f"{name}.json_schema: Field required", f"{name}.json_schema")


def convert_schema(schema: Body | None, name: str) -> GrammarSpec | Problem:
    """Return the grammar for a JSON schema; None as `schema` allows any JSON object.

    `name` is the field of the body, for errors. Return a 400 problem for a schema above `MAX_GRAMMAR_BYTES` or
    `MAX_JSON_DEPTH`, and for a number that is not finite. The node checks the schema itself.
    """
    if schema is None:
        return GrammarSpec(GrammarKind.JSON_OBJECT)
    text = encode_json(schema, name, MAX_GRAMMAR_BYTES)
    return text if isinstance(text, Problem) else GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def _convert_schema_or_text(schema: Body | str, name: str) -> GrammarSpec | Problem:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, schema) if isinstance(schema, str) else convert_schema(schema, name)


def convert_structured_outputs(
    options: StructuredOutputs, prefix: str = "structured_outputs."
) -> dict[str, GrammarSpec | Problem]:
    """Return the grammar, or a 400 problem, for every field that defines a format.

    The result is by field name, with `prefix` before the name, and empty if there is no such field.
    """
    grammars: dict[str, GrammarSpec | Problem] = {}
    if options.json_ is not None:
        grammars[f"{prefix}json"] = _convert_schema_or_text(options.json_, f"{prefix}json")
    if options.regex is not None:
        grammars[f"{prefix}regex"] = GrammarSpec(GrammarKind.REGEX, options.regex)
    if options.choice is not None:
        text = encode_json(options.choice, f"{prefix}choice", MAX_GRAMMAR_BYTES)
        grammars[f"{prefix}choice"] = text if isinstance(text, Problem) else GrammarSpec(GrammarKind.CHOICE, text)
    if options.grammar is not None:
        grammars[f"{prefix}grammar"] = GrammarSpec(GrammarKind.LARK, options.grammar)
    if options.json_object:
        grammars[f"{prefix}json_object"] = GrammarSpec(GrammarKind.JSON_OBJECT)
    return grammars


def select_single_grammar(
    specs: Mapping[str, GrammarSpec | Problem], whitespace: str | None = None
) -> GrammarSpec | Problem | None:
    """Return the only grammar of `specs`, with the pattern `whitespace`; None if `specs` is empty.

    `specs` has grammars, or their problems, by field name. `whitespace` is the pattern of the white space in JSON; None
    for the default. Return a problem if the only grammar is one. Return a 400 problem for several grammars, for a
    grammar or pattern that is too long, and for a pattern without a JSON format.
    """
    if len(specs) > 1:
        names = sorted(specs)
        return build_invalid(f"{', '.join(names)} exclude each other: send only one", names[0])
    if whitespace and not any(isinstance(spec, GrammarSpec) and spec.kind in _JSON_KINDS for spec in specs.values()):
        return build_invalid(
            "whitespace_pattern needs a JSON format: add one, or leave whitespace_pattern out", "whitespace_pattern"
        )
    for name, grammar in specs.items():
        if isinstance(grammar, Problem):
            return grammar
        if len(grammar.value) > MAX_GRAMMAR_BYTES or len(whitespace or "") > MAX_GRAMMAR_BYTES:
            return build_invalid(f"{name} is longer than {MAX_GRAMMAR_BYTES} characters: shorten it", name)
        return GrammarSpec(grammar.kind, grammar.value, whitespace or "")
    return None


def check_backend(name: str | None, field: str) -> Problem | None:
    """Return a 400 problem if the grammar library `name` is not supported; None if it is supported or not given.

    Options after a colon in `name` have no effect. `field` is the field of the body, for the error.
    """
    if name is None or name.partition(":")[0] in BACKENDS:
        return None
    return build_invalid(
        f"{field} {name[:64]!r} is not supported: use {', '.join(BACKENDS)}", field, RefusalCode.UNSUPPORTED.value
    )


def add_call_constraints(
    form: GrammarSpec | None, names: Iterable[str], *, word: str, named: str = "", strict: bool = False
) -> GrammarSpec | Problem | None:
    """Return the grammar of an answer with the constraints on tool calls.

    `form` is the grammar of the answer format; None for no constraint. `word` is `none`, `auto` or `required`. With
    `required`, the grammar of calls replaces `form`. With `auto`, calls are allowed as an alternative to `form`. With
    `none`, `form` is returned unchanged.

    `names` are the names of the tools. `named` is the tool that must be called; empty for any tool. `strict` tells
    whether the arguments of at least one tool must follow its schema.

    Return a 400 problem if `names` lacks the tool that `word` or `named` needs. Return None if nothing constrains the
    answer.
    """
    known = set(names)
    if word == "required" and not known:
        return build_invalid("tool_choice requires a tool call, and the request has no tools", "tool_choice")
    if named and named not in known:
        return build_invalid(f"tool_choice names {named}, which is not in tools", "tool_choice")
    if word == "required":
        return GrammarSpec(calls=CallConstraint.REQUIRED, tool=named)
    if word == "none" or not known or (form is None and not strict):
        return form
    form = form or GrammarSpec()
    return GrammarSpec(form.kind, form.value, form.whitespace, CallConstraint.FREE)
