"""Index recent prompts by node, to estimate the contents of the nodes' prefix caches. Pure.

Theory. The next turn of a conversation begins with all of the last turn. The node that served the last turn has most of
it in its cache and answers sooner. A chain of hashes finds the part that a request shares with earlier requests. The
chain has a hash at the end of every message, and after every `BLOCK_CHARS` characters inside a long message. The
last hash in the chain that is known for a node yields the share of the prompt that needs no prefill there. That share
only shortens the *time* expected there (`place`): memory is counted as if nothing were cached. If the queue of such a
node costs more than the cache saves, another node is faster. A wrong estimate therefore costs time, never safety.

Nodes reuse a prefix only within its scope, usually an API key, and chains belong to a scope as well (`cache_scope`).
Except for shared system prompts, the prompts of one key therefore do not change the placement of another key.

A client may name its conversation (`x-session-id`, `prompt_cache_key`, `user`). If the name yields a larger share than
the chain, the share of the name is used. It is the size of the last prompt with that name relative to this prompt,
times a trust factor. Each further prompt on the same node corrects the factor, because some clients send one `user` for
all conversations.

The index is bounded (`MAX_ENTRIES`) and removes the least recently recorded entry first. An entry is removed when the
node reports that it evicted the prompt. All entries of a node become invalid when the node is gone, or when its engine
restarts without the same disk cache. They also become invalid when a report does not name all evictions.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from wire.frames import Message
from wire.identity import NodeId

BLOCK_CHARS = 2048
"""Characters of one message between two hashes."""
MAX_HASHES = 64
"""Maximum hashes of one prompt: half of them from its start, which has the system prompt, half from its end."""
MAX_ENTRIES = 50_000
"""Maximum of each kind of entry in the index: hashes, prompts and sessions."""
MIN_TRUST = 0.05
"""Trust factor up to which the name of a session is ignored."""
NOWHERE: Mapping[NodeId, float] = MappingProxyType({})
"""Cached shares of a prompt that no node has cached: an empty mapping."""


class PrefixHashChain(msgspec.Struct, frozen=True, gc=False):
    """Chain of hashes of a prompt. Each hash covers the prompt from its start."""

    hashes: tuple[tuple[int, int], ...]
    """Pairs of a hash and the number of characters that it covers, shortest first."""
    size: int
    """Characters of all messages and of the arguments of their tool calls, and 1 for each message."""
    session: int = 0
    """Hash of the name of the conversation; 0 if the client named none."""


@dataclass(slots=True)
class _Session:
    """Node of a named conversation."""

    node: NodeId
    generation: int
    size: int
    """Characters of the last prompt of the conversation."""
    trust: float = 1.0
    """Trust factor of the name, 0 to 1."""


def compute_hash_chain(
    root: object, messages: Sequence[Message], session: str = "", scope: str = "", *, shared: bool = False
) -> PrefixHashChain:
    """Compute the hash chain of a prompt.

    `root` is a hashable value of everything that changes the whole prompt: model and fingerprint, tools, template.
    `session` names the conversation; empty without a name. `scope` is the id of the key that may reuse the cached
    tokens, or `SHARED_SCOPE`. All hashes depend on `scope`. `shared` is whether all keys may reuse the first message;
    the hashes of that message then do not depend on `scope`.
    """
    links: list[tuple[int, int]] = []
    link, size = hash(root) if shared else hash((root, scope)), 0
    for place, message in enumerate(messages):
        if place == 1:
            link = hash((link, scope))
        text = message.content
        for start in range(0, len(text) - BLOCK_CHARS, BLOCK_CHARS):
            link = hash((link, text[start : start + BLOCK_CHARS]))
            links.append((link, size + start + BLOCK_CHARS))
        link = hash((link, message.role, text[(len(text) - 1) // BLOCK_CHARS * BLOCK_CHARS :]))
        size += len(text) + 1
        for call in message.tool_calls:
            link = hash((link, call.name, call.arguments))
            size += len(call.arguments)
        links.append((link, size))
    if len(links) > MAX_HASHES:
        links = links[: MAX_HASHES // 2] + links[-MAX_HASHES // 2 :]
    return PrefixHashChain(tuple(links), size, hash((root, scope, session)) if session else 0)


class PrefixAffinity:
    """Index of the nodes that have probably cached a prompt.

    The index has at most `entries` hashes, `entries` prompts and `entries` sessions. Each node has a generation. A new
    generation invalidates all older entries of the node at once. It begins when the node's cache was lost with its
    engine process, or when evictions were missed.
    """

    def __init__(self, entries: int = MAX_ENTRIES) -> None:
        self._max_entries = entries
        self._nodes_by_hash: OrderedDict[int, dict[NodeId, tuple[int, bytes]]] = OrderedDict()
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._generations: dict[NodeId, int] = {}
        self._instances: dict[NodeId, int] = {}
        self._evictions: dict[NodeId, int] = {}
        self._stores: dict[NodeId, str] = {}
        self._prompts: OrderedDict[tuple[NodeId, bytes], tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes_by_hash) + len(self._sessions) + len(self._prompts)

    def estimate_shares(self, chain: PrefixHashChain) -> Mapping[NodeId, float]:
        """Return the share of a prompt that is probably cached, 0 to 1, by node. Nodes without a share are omitted."""
        shares: dict[NodeId, float] = {}
        for link, size in reversed(chain.hashes):
            nodes = self._nodes_by_hash.get(link)
            if nodes is None:
                continue
            for node, (engine, _) in nodes.items():
                if node not in shares and self._generations.get(node) == engine:
                    shares[node] = size / chain.size
        session = self._sessions.get(chain.session)
        if (
            session is not None
            and session.trust > MIN_TRUST
            and self._generations.get(session.node) == session.generation
        ):
            share = session.trust * min(1.0, session.size / chain.size)
            shares[session.node] = max(share, shares.get(session.node, 0.0))
        return shares or NOWHERE

    def record_prefill(
        self, chain: PrefixHashChain, node: NodeId, prompt_hash: bytes, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """Record that a node has prefilled a prompt of `prompt_tokens`, of which `cached_tokens` were cached.

        `prompt_hash` is the hash by which the node reports the eviction of the prompt. Do nothing if it is empty,
        because the node then caches nothing, and for a prompt without messages.
        """
        if not prompt_hash or not chain.size:
            return
        engine = self._generations.setdefault(node, self._next_generation(node))
        for link, _ in chain.hashes:
            self._nodes_by_hash.setdefault(link, {})[node] = (engine, prompt_hash)
            self._nodes_by_hash.move_to_end(link)
        self._prompts[node, prompt_hash] = tuple(link for link, _ in chain.hashes)
        self._prompts.move_to_end((node, prompt_hash))
        if chain.session:
            self._record_session(chain, node, engine, cached_tokens / prompt_tokens if prompt_tokens else 0.0)
        while len(self._nodes_by_hash) > self._max_entries:
            self._nodes_by_hash.popitem(last=False)
        while len(self._prompts) > self._max_entries:
            self._prompts.popitem(last=False)

    def _record_session(self, chain: PrefixHashChain, node: NodeId, engine: int, cached: float) -> None:
        last = self._sessions.get(chain.session)
        trust = 1.0
        if last is not None and (last.node, last.generation) == (node, engine):
            expected = min(1.0, last.size / chain.size)
            trust = (last.trust + min(1.0, cached / expected)) / 2
        self._sessions[chain.session] = _Session(node, engine, chain.size, trust)
        self._sessions.move_to_end(chain.session)
        while len(self._sessions) > self._max_entries:
            self._sessions.popitem(last=False)

    def apply_report(
        self, node: NodeId, engine_instance: int, evictions: int, evicted: Sequence[bytes], store: str = ""
    ) -> None:
        """Remove the entries that are outdated by a node's report.

        `evicted` has the hashes of the newest evictions, which are removed; the last of them is number `evictions`. If
        the report lacks the hashes of some evictions, all entries of the node are removed.

        If `engine_instance` has changed, all entries are removed, because the cache was lost with the old engine
        process. They are kept if the new process has the same disk cache. `store` identifies the disk cache and is
        empty without one; an engine reports it as soon as it is ready.
        """
        known = self._stores.get(node, "")
        if self._instances.setdefault(node, engine_instance) != engine_instance and (store or not known):
            self._instances[node] = engine_instance
            self._evictions[node] = 0
            if not store or store != known:
                self._generations[node] = self._next_generation(node)
        if store:
            self._stores[node] = store
        new = evictions - self._evictions.get(node, 0)
        self._evictions[node] = evictions
        for prompt_hash in evicted[-new:] if new > 0 else ():
            self._remove_prompt(node, prompt_hash)
        if new > len(evicted):
            self._generations[node] = self._next_generation(node)

    def _remove_prompt(self, node: NodeId, prompt_hash: bytes) -> None:
        """Remove one prompt, and those of its hashes that no other prompt has replaced."""
        for link in self._prompts.pop((node, prompt_hash), ()):
            nodes = self._nodes_by_hash.get(link)
            if nodes is not None and node in nodes and nodes[node][1] == prompt_hash:
                del nodes[node]
                if not nodes:
                    del self._nodes_by_hash[link]

    def _next_generation(self, node: NodeId) -> int:
        return self._generations.get(node, 0) + 1

    def remove_node(self, node: NodeId) -> None:
        """Remove all entries of a node that is no longer a member."""
        for nodes in self._nodes_by_hash.values():
            nodes.pop(node, None)
        for link in [link for link, nodes in self._nodes_by_hash.items() if not nodes]:
            del self._nodes_by_hash[link]
        for key in [key for key in self._prompts if key[0] == node]:
            del self._prompts[key]
        for name in [name for name, session in self._sessions.items() if session.node == node]:
            del self._sessions[name]
        for known in (self._generations, self._instances, self._evictions, self._stores):
            known.pop(node, None)
