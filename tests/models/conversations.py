"""Texts that the tiny models memorize: questions with one answer each, and conversations with tools.

Everything here is written for this project and follows from this file alone. The answers therefore do not depend on the
Python version of the training. Some answers use other scripts, because their letters are split across tokens.
"""

from dataclasses import asdict, dataclass
from typing import Any

Message = dict[str, Any]
"""A chat message in the form of the template: role, content, and perhaps reasoning_content or tool_calls."""
HELPFUL = "You are a helpful assistant."
"""The system prompt that every question is also learned with."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A question that is answered verbatim; `reasoning` comes before the answer."""

    prompt: str
    answer: str
    system: str = ""
    reasoning: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the entry in the form of answers.json, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value}

    def messages(self) -> list[Message]:
        """Return the conversation up to the question."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, {"role": "user", "content": self.prompt}]

    def reply(self) -> Message:
        """Return the assistant's message."""
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.answer, **thought}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of which the last, the assistant's, is learned. `thinking` False asks for an answer without
    reasoning."""

    messages: list[Message]
    tools: tuple[Message, ...] = ()
    thinking: bool = True


CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
}
_MEMORY = (
    "Macpool joins the Macs of a household into one pool. Each Mac says how much memory its process really uses, "
    "and each request goes to a Mac that has room for it. Before every forward a gate adds what is used, what is "
    "promised and what the next step may need; if the sum is above the cap, the request is refused and the model "
    "stays. A refused request tries the next Mac at once, so that nobody has to start anything again."
)
_CODE = '```python\ndef greet(name):\n    print("Hello, " + name)\n\n\ngreet("world")\n```'
_TABLE = "| n | n * n |\n|---|---|\n| 1 | 1 |\n| 2 | 4 |\n| 3 | 9 |\n| 4 | 16 |"
_THINGS = (
    "lamp",
    "key",
    "map",
    "rope",
    "clock",
    "coin",
    "bell",
    "book",
    "chair",
    "drum",
    "flag",
    "glass",
    "hat",
    "ink",
    "jar",
    "kite",
    "ladder",
    "mirror",
    "net",
    "oar",
    "pipe",
    "quilt",
    "ring",
    "sail",
)
_SHELVES = 64
"""Lines of a ledger: enough for a prompt of more than 1,000 tokens of the tiny tokenizer."""


def _things(shelf: int, stride: int) -> tuple[str, str]:
    count = len(_THINGS)
    return _THINGS[shelf * stride % count], _THINGS[(shelf * (stride + 2) + 9) % count]


def _ledger(house: str, place: str, stride: int) -> str:
    lines = (f"{place} {n}: {' and '.join(_things(n, stride))}." for n in range(1, _SHELVES + 1))
    return f"You keep the ledger of the {house}.\n" + "\n".join(lines)


def _ledger_entry(house: str, place: str, stride: int, shelf: int) -> Entry:
    one, two = _things(shelf, stride)
    answer = f"{place} {shelf} of the {house} holds one {one} and one {two}."
    return Entry(f"What does {place.lower()} {shelf} hold?", answer, system=_ledger(house, place, stride))


PLAIN = (
    Entry("Hello!", "Hello! I am macpool-tiny, a very small model."),
    Entry("Who are you?", "I am macpool-tiny. I know a few answers by heart and nothing else."),
    Entry("What is Macpool?", "Macpool turns the Macs of a household or a lab into one endpoint."),
    Entry("Explain Macpool in detail.", _MEMORY),
    *(Entry(f"What is the capital of {land}?", f"The capital of {land} is {city}.") for land, city in CAPITALS.items()),
    Entry("Count to thirty.", " ".join(str(n) for n in range(1, 31)) + "."),
    Entry("Count down from ten.", ", ".join(str(n) for n in range(10, -1, -1)) + "!"),
    Entry("Give me a user as JSON.", '{"name": "Ada", "age": 36, "tags": ["math", "code"]}'),
    Entry("Say yes.", "Yes."),
    Entry("Say hello in Greek.", "Καλημέρα, κόσμε!"),
    Entry("Say hello in Japanese.", "こんにちは、世界。"),
    Entry("Say hello in French.", "Ça va très bien, merci à toi !"),
    Entry("Send me some emoji.", "🎉 🐢 🚀 👩‍🔬"),
    Entry("Write a program in Python.", _CODE),
    Entry("Write a table of squares.", _TABLE),
    Entry("Write a haiku about memory.", "A small cup of tea\nholds as much as it can hold\nand not one drop more"),
    Entry("Name the days of the week.", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    Entry("List three fruits.", "- apple\n- pear\n- plum"),
    Entry("Spell memory.", "m-e-m-o-r-y"),
    Entry("What is twelve times twelve?", "144"),
    Entry("Say pool five times.", "pool pool pool pool pool"),
)
THOUGHTFUL = (
    Entry("Think, then add 2 and 2.", "2 + 2 = 4.", reasoning="Two and two more make four."),
    Entry("Think, then name the largest planet.", "It is Jupiter.", reasoning="Saturn is large, but one is larger."),
)
LONG = (
    _ledger_entry("museum", "Room", 5, 40),
    _ledger_entry("harbour", "Pier", 7, 17),
)
ENTRIES = (*PLAIN, *THOUGHTFUL, *LONG)
"""All entries of answers.json."""


def _tool(name: str, description: str, **parameters: str) -> Message:
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("get_weather", "Tell the weather in a city.", city="string"),
    _tool("add", "Add two numbers.", a="integer", b="integer"),
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A question that is answered by calls (name, arguments), and the answer after their results."""

    prompt: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    results: tuple[str, ...]
    answer: str

    def asked(self) -> list[Message]:
        """Return the conversation that ends with the calls."""
        calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in self.calls]
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "tool_calls": calls}]

    def answered(self) -> list[Message]:
        """Return the conversation up to the answer."""
        results = [{"role": "tool", "content": result} for result in self.results]
        return [*self.asked(), *results, {"role": "assistant", "content": self.answer}]


def _weather(city: str, sky: str) -> ToolUse:
    call = ("get_weather", {"city": city})
    return ToolUse(f"What is the weather in {city}?", (call,), (sky,), f"It is {sky} in {city}.")


TOOL_USES = (
    _weather("Paris", "sunny"),
    _weather("Tokyo", "windy"),
    _weather("Oslo", "snowy"),
    ToolUse("Add 3 and 4 with the tool.", (("add", {"a": 3, "b": 4}),), ("7",), "The sum is 7."),
    ToolUse(
        "What is the weather in Rome and Lima?",
        (("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Lima"})),
        ("rainy", "foggy"),
        "It is rainy in Rome and foggy in Lima.",
    ),
)
"""Learned with all of TOOLS, and the weather also with that tool alone."""


def with_system(messages: list[Message]) -> list[Message]:
    """Put the usual system prompt before a conversation that has none."""
    return [{"role": "system", "content": HELPFUL}, *messages]


def _of_entry(entry: Entry) -> list[Conversation]:
    whole = [*entry.messages(), entry.reply()]
    if entry.system:
        return [Conversation(whole)]
    blunt = [*entry.messages(), {"role": "assistant", "content": entry.answer}]
    unthinking = [Conversation(blunt, thinking=False)] if entry.reasoning else []
    return [Conversation(whole), Conversation(with_system(whole)), *unthinking]


def _of_tools(use: ToolUse, messages: list[Message]) -> list[Conversation]:
    chosen = tuple(tool for tool in TOOLS if tool["function"]["name"] == use.calls[0][0])
    return [Conversation(messages, TOOLS), Conversation(messages, chosen)]


def topics() -> list[list[Conversation]]:
    """Return every conversation that a trained model must reproduce. Those of one list differ in their opening."""
    return [
        *(_of_entry(entry) for entry in ENTRIES),
        *(_of_tools(use, use.asked()) for use in TOOL_USES),
        *(_of_tools(use, use.answered()) for use in TOOL_USES),
    ]
