"""Where a prompt was read before: the router's guess at what the nodes' prefix caches hold. Pure.

Theory. A conversation's next turn begins with all of the last one, so the node that read that one has most of it in its
cache and answers sooner. What a request shares with earlier ones is found by a chain of hashes: one for every beginning
of its text that ends with a message, or with a block of BLOCK characters inside a long one. The deepest hash that is
known for a node says which share of the prompt need not be read there again. That only shortens the *time* expected
there (`placement`): memory is counted as if nothing were cached, and where the queue in front of a warm node costs more
than the cache saves, another node is sooner. So a guess that is wrong costs time, never safety.

Nodes reuse a prefix only for the key that sent it, and chains belong to a key, too (`cache_scope`). So where one key's
prompts went changes no placement of another key.

A client that names its conversation (`x-session-id`, `prompt_cache_key`, `user`) is believed where the chain knows
nothing: then the share is what the last prompt of that name was of this one, times a trust that every answer corrects,
because some clients send one `user` for everything.

What is known is bounded (ENTRIES), the least recently used goes first. It is dropped when the node tells that it has
evicted the prompt, and all of a node's when its engine is another one or the node is gone.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from wire.frames import Message
from wire.identity import NodeId

BLOCK = 2048
"""Characters of one message between two hashes."""
MOST_LINKS = 64
"""Hashes of one prompt: half from its beginning, where system prompts end, half from its end."""
ENTRIES = 50_000
LEAST_TRUST = 0.05
"""Below this a session's name is not believed any more."""
NOWHERE: Mapping[NodeId, float] = MappingProxyType({})


class Chain(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the index sees it: hashes with the characters up to each, shortest first, and the hash of the
    session that the client named, 0 if it named none."""

    links: tuple[tuple[int, int], ...]
    size: int
    session: int = 0


@dataclass(slots=True)
class _Session:
    """Where a named conversation was answered, with how many characters of prompt, and how far that is worth
    believing."""

    node: NodeId
    engine: int
    size: int
    trust: float = 1.0


def chain_of(
    root: object, messages: Sequence[Message], session: str = "", scope: str = "", *, shared: bool = False
) -> Chain:
    """Return the chain of a prompt. `root` is what changes all of it: model and fingerprint, tools, template; `session`
    names the conversation. Both belong to `scope`, the key that may reuse what was cached; where the first message is
    `shared` by all keys, the links of that message alone belong to all."""
    links: list[tuple[int, int]] = []
    link, size = hash(root) if shared else hash((root, scope)), 0
    for place, message in enumerate(messages):
        if place == 1:
            link = hash((link, scope))
        text = message.content
        for start in range(0, len(text) - BLOCK, BLOCK):
            link = hash((link, text[start : start + BLOCK]))
            links.append((link, size + start + BLOCK))
        link = hash((link, message.role, text[(len(text) - 1) // BLOCK * BLOCK :]))
        size += len(text) + 1
        for call in message.tool_calls:
            link = hash((link, call.name, call.arguments))
            size += len(call.arguments)
        links.append((link, size))
    if len(links) > MOST_LINKS:
        links = links[: MOST_LINKS // 2] + links[-MOST_LINKS // 2 :]
    return Chain(tuple(links), size, hash((root, scope, session)) if session else 0)


class Affinity:
    """The index. One engine's life on a node has a number (`engine`), by which everything of an earlier one is
    forgotten at once."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._most = entries
        self._links: OrderedDict[int, dict[NodeId, tuple[int, bytes]]] = OrderedDict()
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._engines: dict[NodeId, int] = {}
        self._lives: dict[NodeId, int] = {}
        self._evictions: dict[NodeId, int] = {}
        self._prompts: OrderedDict[tuple[NodeId, bytes], tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links) + len(self._sessions) + len(self._prompts)

    def shares(self, chain: Chain) -> Mapping[NodeId, float]:
        """Say which share of a prompt each node has read before, 0 to 1; nodes that have read nothing are left out."""
        found: dict[NodeId, float] = {}
        for link, size in reversed(chain.links):
            nodes = self._links.get(link)
            if nodes is None:
                continue
            for node, (engine, _) in nodes.items():
                if node not in found and self._engines.get(node) == engine:
                    found[node] = size / chain.size
        session = self._sessions.get(chain.session)
        if session is not None and session.trust > LEAST_TRUST and self._engines.get(session.node) == session.engine:
            told = session.trust * min(1.0, session.size / chain.size)
            found[session.node] = max(told, found.get(session.node, 0.0))
        return found or NOWHERE

    def read(self, chain: Chain, node: NodeId, prompt_hash: bytes, prompt_tokens: int, cached_tokens: int) -> None:
        """Take in that a node has read a prompt, and how much of it was in its cache. Without a `prompt_hash` it keeps
        nothing."""
        if not prompt_hash or not chain.size:
            return
        engine = self._engines.setdefault(node, self._new_life(node))
        for link, _ in chain.links:
            self._links.setdefault(link, {})[node] = (engine, prompt_hash)
            self._links.move_to_end(link)
        self._prompts[node, prompt_hash] = tuple(link for link, _ in chain.links)
        self._prompts.move_to_end((node, prompt_hash))
        if chain.session:
            self._remember(chain, node, engine, cached_tokens / prompt_tokens if prompt_tokens else 0.0)
        while len(self._links) > self._most:
            self._links.popitem(last=False)
        while len(self._prompts) > self._most:
            self._prompts.popitem(last=False)

    def _remember(self, chain: Chain, node: NodeId, engine: int, cached: float) -> None:
        last = self._sessions.get(chain.session)
        trust = 1.0
        if last is not None and (last.node, last.engine) == (node, engine):
            expected = min(1.0, last.size / chain.size)
            trust = (last.trust + min(1.0, cached / expected)) / 2
        self._sessions[chain.session] = _Session(node, engine, chain.size, trust)
        self._sessions.move_to_end(chain.session)
        while len(self._sessions) > self._most:
            self._sessions.popitem(last=False)

    def heard(self, node: NodeId, life: int, evictions: int, evicted: Sequence[bytes]) -> None:
        """Follow a report: `life` changes when the engine was started anew; `evicted` are the hashes of the newest
        evictions, the last of them number `evictions`."""
        if self._lives.setdefault(node, life) != life:
            self._lives[node] = life
            self._engines[node] = self._new_life(node)
        new = evictions - self._evictions.get(node, 0)
        self._evictions[node] = evictions
        for prompt_hash in evicted[-new:] if new > 0 else ():
            self._drop(node, prompt_hash)
        if new > len(evicted):
            self._engines[node] = self._new_life(node)

    def _drop(self, node: NodeId, prompt_hash: bytes) -> None:
        """Forget one prompt: its beginnings too, where no other prompt was read that has them."""
        for link in self._prompts.pop((node, prompt_hash), ()):
            nodes = self._links.get(link)
            if nodes is not None and node in nodes and nodes[node][1] == prompt_hash:
                del nodes[node]
                if not nodes:
                    del self._links[link]

    def _new_life(self, node: NodeId) -> int:
        return self._engines.get(node, 0) + 1

    def forget(self, node: NodeId) -> None:
        """Forget everything about a node: it was removed."""
        for nodes in self._links.values():
            nodes.pop(node, None)
        for link in [link for link, nodes in self._links.items() if not nodes]:
            del self._links[link]
        for key in [key for key in self._prompts if key[0] == node]:
            del self._prompts[key]
        for name in [name for name, session in self._sessions.items() if session.node == node]:
            del self._sessions[name]
        for known in (self._engines, self._lives, self._evictions):
            known.pop(node, None)
