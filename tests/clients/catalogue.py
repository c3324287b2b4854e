"""The clients under test: installation and configuration. {base}, {key}, {folder} and {name} stand for those of a
pool."""

from dataclasses import dataclass, field

MODEL = "macpool-tiny"
OTHERS = {
    "vectors": ("engine.scripted.model=vectors", "engine.scripted.dimensions=8"),
    "scores": ("engine.scripted.model=scores", "engine.scripted.reranks=true"),
}
"""Settings of the nodes for embeddings and rerank, by their model."""
NODE = "NODE_EXTRA_CA_CERTS"


@dataclass(frozen=True, slots=True)
class Client:
    """One client. Without a command it cannot run here, and its recording follows its source.

    `pip` and `npm`: Packages that are installed for it.
    `files`: Files that are written into its home folder.
    `command`: Runs in that folder, with `variables` set.
    """

    name: str
    command: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict[str, str])
    variables: dict[str, str] = field(default_factory=dict[str, str])
    trust: str = "SSL_CERT_FILE"
    """The variable in which the client looks for the pool's authority; empty if it uses only the system's."""


_PYTHON = "{folder}/{name}/bin/python"
_OPENAI_PY = """
from openai import OpenAI
client = OpenAI()
print([model.id for model in client.models.list()])
said = [{"role": "user", "content": "Hello!"}]
print(client.chat.completions.create(model="macpool-tiny", messages=said).choices[0].message.content)
with client.chat.completions.stream(model="macpool-tiny", messages=said) as stream:
    print(stream.get_final_completion().choices[0].message.content)
print(client.responses.create(model="macpool-tiny", input="Hello!").output_text)
"""
_OPENAI_JS = """
import OpenAI from "openai";
const client = new OpenAI();
for await (const model of client.models.list()) console.log(model.id);
const messages = [{ role: "user", content: "Hello!" }];
const options = { model: "macpool-tiny", messages, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(options))
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log((await client.responses.create({ model: "macpool-tiny", input: "Hello!" })).output_text);
"""
_ANTHROPIC = """
from anthropic import Anthropic
client = Anthropic()
said = [{"role": "user", "content": "Hello!"}]
print(client.messages.count_tokens(model="macpool-tiny", messages=said).input_tokens)
with client.messages.stream(model="macpool-tiny", max_tokens=64, messages=said) as stream:
    print(stream.get_final_text())
"""
_LANGCHAIN = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

model = ChatOpenAI(model="macpool-tiny")
print(model.invoke("Hello!").content)
print("".join(chunk.content for chunk in model.stream("Hello!")))
print(model.bind_tools([add]).invoke("Hello!").content)
"""
_LLAMA_INDEX = """
import os
from llama_index.llms.openai_like import OpenAILike
model = OpenAILike(model="macpool-tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"],
                   is_chat_model=True)
print(model.complete("Hello!"))
print("".join(chunk.delta for chunk in model.stream_complete("Hello!")))
"""
_OLLAMA = """
from ollama import Client
client = Client()
print([model.model for model in client.list().models], client.show("macpool-tiny").capabilities)
said = [{"role": "user", "content": "Hello!"}]
print("".join(chunk.message.content for chunk in client.chat("macpool-tiny", messages=said, stream=True)))
"""
_RETRIEVAL = """
import os
import cohere, ollama, openai
from langchain_openai import OpenAIEmbeddings
texts = ["Hello!", "Hello!"]
print(len(openai.OpenAI().embeddings.create(model="vectors", input=texts).data))
print(len(ollama.Client().embed(model="vectors", input=texts).embeddings))
print(len(OpenAIEmbeddings(model="vectors", check_embedding_ctx_length=False).embed_documents(texts)))
url, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
for client in (cohere.Client(key, base_url=url), cohere.ClientV2(key, base_url=url)):
    results = client.rerank(model="scores", query="Hello!", documents=texts, top_n=1).results
    print([(one.index, one.relevance_score) for one in results])
"""
_CONTINUE = """
name: Macpool
version: 1.0.0
schema: v1
models:
  - {name: tiny, provider: openai, model: macpool-tiny, apiBase: "{base}/v1", apiKey: "{key}", roles: [chat]}
"""
_CODEX = """
model = "macpool-tiny"
model_provider = "macpool"

[model_providers.macpool]
name = "Macpool"
base_url = "{base}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_OPENCODE = """
{
  "provider": {
    "macpool": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "Macpool",
      "options": {"baseURL": "{base}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"macpool-tiny": {"limit": {"context": 32768, "output": 2048}}}
    }
  },
  "model": "macpool/macpool-tiny",
  "small_model": "macpool/macpool-tiny",
  "autoupdate": false
}
"""
_CLINE = (
    "{folder}/{name}/node_modules/.bin/cline auth -p openai -k {key} -m macpool-tiny -b {base}/v1 && "
    "timeout -k 2 20 {folder}/{name}/node_modules/.bin/cline -y 'Say hello to me.'; test $? -ge 124"
)


def _program(name: str, text: str, *pip: str) -> Client:
    return Client(name, (_PYTHON, "ask.py"), pip=pip, files={"ask.py": text})


CLIENTS = (
    _program("openai-python", _OPENAI_PY, "openai"),
    Client("openai-javascript", ("node", "ask.mjs"), npm=("openai",), files={"ask.mjs": _OPENAI_JS}, trust=NODE),
    _program("anthropic", _ANTHROPIC, "anthropic"),
    _program("langchain", _LANGCHAIN, "langchain-openai"),
    _program("llama-index", _LLAMA_INDEX, "llama-index-llms-openai-like"),
    _program("ollama", _OLLAMA, "ollama"),
    _program("retrieval", _RETRIEVAL, "openai", "ollama", "langchain-openai", "cohere"),
    Client(
        "aider",
        (
            "{folder}/{name}/bin/aider",
            "--model",
            f"openai/{MODEL}",
            "--message",
            "Hello!",
            "--no-git",
            "--yes-always",
            "--no-check-update",
            "--no-show-model-warnings",
            "--no-analytics",
        ),
        pip=("aider-chat",),
    ),
    Client(
        "claude-code",
        ("{folder}/{name}/node_modules/.bin/claude", "-p", "Hello!", "--model", MODEL),
        npm=("@anthropic-ai/claude-code",),
        trust=NODE,
        variables={
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Client(
        "continue",
        ("{folder}/{name}/node_modules/.bin/cn", "-p", "Hello!", "--config", "config.yaml"),
        npm=("@continuedev/cli",),
        files={"config.yaml": _CONTINUE},
        trust=NODE,
    ),
    Client("cline", ("sh", "-c", _CLINE), npm=("cline",), trust=NODE),
    Client(
        "codex",
        ("{folder}/{name}/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "Hello!"),
        npm=("@openai/codex",),
        files={".codex/config.toml": _CODEX},
    ),
    Client(
        "opencode",
        ("{folder}/{name}/node_modules/.bin/opencode", "run", "Hello!"),
        npm=("opencode-ai",),
        files={".config/opencode/opencode.json": _OPENCODE},
        trust=NODE,
    ),
    Client("open-webui"),
    Client("librechat", trust=NODE),
    Client("zed", trust=""),
    Client("home-assistant", trust="REQUESTS_CA_BUNDLE"),
)
