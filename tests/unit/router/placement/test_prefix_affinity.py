"""The router's index of the nodes' prefix caches."""

from hypothesis import given
from hypothesis import strategies as st

from router.placement.prefix_affinity import (
    BLOCK_CHARS,
    MAX_HASHES,
    NOWHERE,
    PrefixAffinity,
    PrefixHashChain,
    compute_hash_chain,
)
from wire.frames import Message, ToolCall
from wire.identity import NodeId

A, B = NodeId("a"), NodeId("b")
HASH = b"prompt"


def user(text: str) -> Message:
    return Message("user", text)


def build_answer_message(text: str) -> Message:
    return Message("assistant", text)


def chain(*messages: Message, session: str = "", root: object = "tiny") -> PrefixHashChain:
    return compute_hash_chain(root, messages, session)


def of_key(key: str, *messages: Message, session: str = "", shared: bool = False) -> PrefixHashChain:
    return compute_hash_chain("tiny", messages, session, key, shared=shared)


def known(*prompts: tuple[NodeId, PrefixHashChain, bytes]) -> PrefixAffinity:
    index = PrefixAffinity()
    for node, prompt, name in prompts:
        index.record_prefill(prompt, node, name, 100, 0)
    return index


def test_next_message_matches_the_prefix_of_the_previous_one():
    first = chain(user("x" * 999))
    index = known((A, first, HASH))
    turn = chain(user("x" * 999), build_answer_message("y" * 499), user("z" * 499))
    assert index.estimate_shares(turn) == {A: 0.5}
    assert index.estimate_shares(first) == {A: 1.0}


def test_another_conversation_or_model_or_tool_is_known_nowhere():
    index = known((A, chain(user("hello")), HASH))
    assert index.estimate_shares(chain(user("hullo"))) is NOWHERE
    assert index.estimate_shares(chain(user("hello"), root="other")) is NOWHERE
    assert index.estimate_shares(chain(Message("system", "hello"))) is NOWHERE


def test_shared_system_prompt_counts_up_to_its_end():
    system = Message("system", "s" * 899)
    index = known((A, chain(system, user("one")), HASH))
    share = index.estimate_shares(chain(system, user("t" * 99)))[A]
    assert share == 0.9


def test_where_one_key_was_answered_is_known_to_that_key_alone():
    prompt = user("x" * 999)
    index = known((A, of_key("alice", prompt, session="chat"), HASH))
    assert index.estimate_shares(of_key("alice", prompt)) == {A: 1.0}
    assert index.estimate_shares(of_key("alice", user("y"), session="chat")) == {A: 1.0}
    assert index.estimate_shares(of_key("mallory", prompt)) is NOWHERE
    assert index.estimate_shares(of_key("mallory", user("y"), session="chat")) is NOWHERE


def test_text_after_a_shared_system_prompt_is_private_to_its_key():
    system, question = Message("system", "s" * 899), user("q" * 99)
    index = known((A, of_key("alice", system, question, shared=True), HASH))
    assert index.estimate_shares(of_key("alice", system, question, shared=True)) == {A: 1.0}
    assert index.estimate_shares(of_key("mallory", system, question, shared=True)) == {A: 0.9}
    assert index.estimate_shares(of_key("mallory", system, question)) is NOWHERE


def test_a_long_document_is_known_up_to_the_block_where_the_question_differs():
    document = "d" * (10 * BLOCK_CHARS)
    index = known((A, chain(user(document + "first question")), HASH))
    share = index.estimate_shares(chain(user(document + "second question")))[A]
    assert 0.89 < share < 1.0


def test_calls_of_tools_belong_to_the_prompt():
    call = Message("assistant", "", tool_calls=(ToolCall("1", "look", "{}"),))
    other = Message("assistant", "", tool_calls=(ToolCall("1", "look", '{"a": 1}'),))
    index = known((A, chain(user("q" * 9), call), HASH))
    assert index.estimate_shares(chain(user("q" * 9), call))[A] == 1.0
    assert index.estimate_shares(chain(user("q" * 9), other))[A] < 1.0


def test_estimate_shares_uses_the_longest_prefix_of_each_node():
    one, two = chain(user("x" * 99)), chain(user("x" * 99), build_answer_message("y" * 99), user("z" * 99))
    index = known((A, one, HASH), (B, two, HASH))
    shares = index.estimate_shares(two)
    assert shares == {A: 1 / 3, B: 1.0}


def test_a_node_that_keeps_nothing_is_not_credited():
    assert known((A, chain(user("hello")), b"")).estimate_shares(chain(user("hello"))) is NOWHERE


def test_an_eviction_is_followed_once():
    old, new = chain(user("old")), chain(user("new"))
    index = known((A, old, b"old"), (A, new, b"new"))
    index.apply_report(A, 1, 1, (b"old",))
    assert index.estimate_shares(old) is NOWHERE
    assert index.estimate_shares(new) == {A: 1.0}
    index.record_prefill(old, A, b"old", 100, 0)
    index.apply_report(A, 1, 1, (b"old",))
    assert index.estimate_shares(old) == {A: 1.0}, "the report repeats the eviction"


def test_unlisted_evictions_clear_the_node():
    index = known((A, chain(user("hello")), HASH), (B, chain(user("hello")), HASH))
    index.apply_report(A, 1, 0, ())
    index.apply_report(A, 1, 5, (b"x", b"y"))
    assert index.estimate_shares(chain(user("hello"))) == {B: 1.0}


def test_new_engine_starts_without_prefixes():
    index = known((A, chain(user("hello")), HASH))
    index.apply_report(A, 1, 0, ())
    assert index.estimate_shares(chain(user("hello"))) == {A: 1.0}
    index.apply_report(A, 2, 0, ())
    assert index.estimate_shares(chain(user("hello"))) is NOWHERE
    index.record_prefill(chain(user("hello")), A, HASH, 10, 0)
    assert index.estimate_shares(chain(user("hello"))) == {A: 1.0}


def test_new_engine_with_the_same_disk_cache_keeps_its_prefixes():
    index, prompt = known((A, chain(user("hello")), HASH)), chain(user("hello"))
    index.apply_report(A, 1, 3, (), "store")
    index.record_prefill(prompt, A, HASH, 10, 0)
    index.apply_report(A, 2, 0, ())
    assert index.estimate_shares(prompt) == {A: 1.0}, "it has not opened its disk cache yet"
    index.apply_report(A, 2, 0, (), "store")
    assert index.estimate_shares(prompt) == {A: 1.0}
    index.apply_report(A, 2, 1, (HASH,), "store")
    assert index.estimate_shares(prompt) is NOWHERE, "evictions are counted from 0 again"
    index.record_prefill(prompt, A, HASH, 10, 0)
    index.apply_report(A, 3, 0, (), "other")
    assert index.estimate_shares(prompt) is NOWHERE


def test_evictions_in_the_first_report_of_a_new_engine_are_followed():
    old, kept = chain(user("old")), chain(user("kept"))
    index = known((A, old, b"old"), (A, kept, b"kept"))
    index.apply_report(A, 1, 0, (), "store")
    index.apply_report(A, 1, 3, (b"x", b"y", b"z"), "store")
    index.apply_report(A, 2, 1, (b"old",), "store")
    assert index.estimate_shares(old) is NOWHERE
    assert index.estimate_shares(kept) == {A: 1.0}


def test_named_session_counts_where_the_text_is_unknown():
    index = PrefixAffinity()
    index.record_prefill(chain(user("summary one" * 50), session="s"), A, HASH, 100, 0)
    other = chain(user("quite other text, as long" * 50), session="s")
    assert 0.4 < index.estimate_shares(other)[A] <= 1.0
    assert index.estimate_shares(chain(user("quite other text, as long" * 50), session="t")) is NOWHERE


def test_a_name_that_is_used_for_everything_loses_its_credit():
    index = PrefixAffinity()
    for number in range(8):
        index.record_prefill(chain(user(f"{number} " * 99), session="app"), A, bytes([number]), 100, 0)
    assert index.estimate_shares(chain(user("and another" * 20), session="app")) is NOWHERE


def test_session_with_cache_hits_keeps_its_estimate():
    index = PrefixAffinity()
    for number in range(8):
        index.record_prefill(chain(user(f"{number} " * 99), session="s"), A, bytes([number]), 100, 90)
    assert index.estimate_shares(chain(user("9 " * 99), session="s"))[A] > 0.8


def test_the_index_is_bounded():
    index = PrefixAffinity(entries=10)
    for number in range(100):
        index.record_prefill(chain(user(f"text {number}"), session=str(number)), A, b"%d" % number, 10, 0)
    assert len(index) <= 30
    assert index.estimate_shares(chain(user("text 99"))) == {A: 1.0}
    assert index.estimate_shares(chain(user("text 1"))) is NOWHERE


def test_a_removed_node_leaves_nothing_behind():
    index = known((A, chain(user("hello"), session="s"), HASH), (B, chain(user("hello")), HASH))
    index.remove_node(A)
    assert index.estimate_shares(chain(user("hello"), session="s")) == {B: 1.0}
    index.remove_node(B)
    assert len(index) == 0


def sizes(*messages: Message) -> list[int]:
    return [size for _, size in chain(*messages).hashes]


def test_links_end_at_messages_and_at_whole_blocks_inside_long_ones():
    assert sizes(user("x" * BLOCK_CHARS)) == [BLOCK_CHARS + 1]
    assert sizes(user("x" * (BLOCK_CHARS + 1))) == [BLOCK_CHARS, BLOCK_CHARS + 2]
    assert sizes(user("x" * 2 * BLOCK_CHARS)) == [BLOCK_CHARS, 2 * BLOCK_CHARS + 1]
    assert sizes(user("ab"), user("x" * 5000), user("c")) == [3, 3 + BLOCK_CHARS, 3 + 2 * BLOCK_CHARS, 5004, 5006]
    call = ToolCall("1", "look", '{"a": 1}')
    assert sizes(Message("assistant", "ab", tool_calls=(call, call)), user("c")) == [3 + 8 + 8, 21]
    assert sizes() == []
    many = sizes(*(user("x") for _ in range(100)))
    assert many == [*range(2, 66, 2), *range(138, 202, 2)], "the first half and the last half of 64"
    assert sizes(*(user("x") for _ in range(64))) == [*range(2, 130, 2)]


def test_every_block_and_the_role_of_a_message_belong_to_the_prompt():
    text = "x" * 3 * BLOCK_CHARS + "end"
    index = known((A, chain(user(text)), HASH))
    assert index.estimate_shares(chain(user(text[:-3] + "and"))) == {A: 3 * BLOCK_CHARS / (3 * BLOCK_CHARS + 4)}
    changed = text[:BLOCK_CHARS] + "y" + text[BLOCK_CHARS + 1 :]
    assert index.estimate_shares(chain(user(changed))) == {A: BLOCK_CHARS / (3 * BLOCK_CHARS + 4)}
    assert index.estimate_shares(chain(build_answer_message(text))) == {A: 3 * BLOCK_CHARS / (3 * BLOCK_CHARS + 4)}
    index = known((A, chain(user("x" * 2 * BLOCK_CHARS)), HASH))
    assert index.estimate_shares(chain(user("x" * (2 * BLOCK_CHARS - 1) + "y"))) == {
        A: BLOCK_CHARS / (2 * BLOCK_CHARS + 1)
    }


def test_session_estimate_is_prompt_share_times_hit_rate():
    index = PrefixAffinity()

    def share(size: int) -> float:
        return index.estimate_shares(chain(user("?" * (size - 1)), session="s")).get(A, 0.0)

    index.record_prefill(chain(user("a" * 99), session="s"), A, b"1", 100, 0)
    assert (share(400), share(50)) == (0.25, 1.0)
    index.record_prefill(chain(user("b" * 199), session="s"), A, b"2", 100, 25)
    assert share(400) == 0.75 * 0.5, "half of the prompt was expected in the cache, and half of that was there"
    index.record_prefill(chain(user("c" * 399), session="s"), A, b"3", 100, 100)
    assert share(400) == 0.875, "more than was expected proves no more than all"
    index.record_prefill(chain(user("d" * 399), session="s"), A, b"4", 0, 0)
    assert share(400) == 0.4375
    index.record_prefill(chain(user("e" * 99), session="s"), A, b"5", 100, 50)
    assert share(100) == (0.4375 + 0.5) / 2, "of a shorter prompt all was expected"
    index.record_prefill(chain(user("f" * 399), session="s"), B, b"6", 100, 0)
    assert index.estimate_shares(chain(user("?" * 399), session="s")) == {B: 1.0}, (
        "another node starts with the initial trust"
    )


def test_session_counts_only_above_the_text_match():
    index = PrefixAffinity()
    for _ in range(3):
        index.record_prefill(chain(user("a" * 99), build_answer_message("b" * 99), session="s"), A, HASH, 100, 0)
    assert index.estimate_shares(chain(user("a" * 99), build_answer_message("c" * 99), session="s")) == {A: 0.5}
    assert index.estimate_shares(chain(user("?" * 199), session="s")) == {A: 0.25}
    for _ in range(2):
        index.record_prefill(chain(user("a" * 199), session="s"), A, HASH, 100, 0)
    assert index.estimate_shares(chain(user("?" * 199), session="s")) == {A: 0.0625}
    index.record_prefill(chain(user("a" * 199), session="s"), A, HASH, 10_000, 375)
    assert index.estimate_shares(chain(user("?" * 199), session="s")) is NOWHERE, "its trust is LEAST_TRUST"


def test_session_of_a_former_engine_does_not_count():
    index = PrefixAffinity()
    index.apply_report(A, 1, 0, ())
    index.record_prefill(chain(user("a" * 99), session="s"), A, HASH, 100, 0)
    index.apply_report(A, 2, 0, ())
    assert index.estimate_shares(chain(user("?"), session="s")) is NOWHERE


def test_a_prompt_without_messages_is_not_remembered():
    index = known((A, chain(session="s"), HASH))
    assert len(index) == 0


def test_only_the_newest_evictions_are_followed_and_a_new_engine_counts_from_nothing():
    prompts = {name: chain(user(name.decode())) for name in (b"one", b"two", b"three")}
    index = known(*((A, prompt, name) for name, prompt in prompts.items()))

    def left() -> list[bytes]:
        return [name for name, prompt in prompts.items() if index.estimate_shares(prompt)]

    index.apply_report(A, 1, 7, (b"x",) * 7)
    index.apply_report(A, 1, 8, (b"two", b"one"))
    assert left() == [b"two", b"three"]
    index.apply_report(A, 1, 10, (b"x", b"two"))
    assert left() == [b"three"]
    index.apply_report(A, 1, 13, (b"x", b"x"))
    assert left() == [], "one of three evictions is not named"
    index.record_prefill(prompts[b"one"], A, b"one", 10, 0)
    index.record_prefill(prompts[b"two"], A, b"two", 10, 0)
    index.apply_report(A, 2, 0, ())
    index.record_prefill(prompts[b"one"], A, b"one", 10, 0)
    index.record_prefill(prompts[b"two"], A, b"two", 10, 0)
    index.apply_report(A, 2, 1, (b"one",))
    assert left() == [b"two"]


def test_an_eviction_forgets_a_beginning_that_no_later_prompt_has():
    short, long = chain(user("a" * 9)), chain(user("a" * 9), build_answer_message("b" * 9))
    index = known((A, long, b"long"), (A, short, b"short"), (B, short, b"short"))
    index.apply_report(A, 1, 1, (b"long",))
    assert index.estimate_shares(long) == {A: 0.5, B: 0.5}
    index.apply_report(A, 1, 2, (b"short",))
    assert index.estimate_shares(long) == {B: 0.5}
    index.apply_report(B, 1, 1, (b"short",))
    assert len(index) == 0


def test_full_index_keeps_recently_used_prefixes():
    index = PrefixAffinity(entries=3)
    for text in ("one", "two", "three", "one", "four", "five"):
        index.record_prefill(chain(user(text), session=text), A, text.encode(), 10, 0)
    assert len(index) == 9
    seen = [text for text in ("one", "two", "three", "four", "five") if index.estimate_shares(chain(user(text)))]
    named = [text for text in ("one", "two", "three") if index.estimate_shares(chain(user("?"), session=text))]
    assert (seen, named) == (["one", "four", "five"], ["one"])
    index.apply_report(A, 1, 2, (b"five", b"one"))
    assert [index.estimate_shares(chain(user(text))) for text in ("one", "four", "five")] == [
        NOWHERE,
        {A: 1.0},
        NOWHERE,
    ]


def test_eviction_of_a_partly_unknown_prefix_changes_nothing_else():
    index = PrefixAffinity(entries=1)
    index.record_prefill(chain(user("one"), build_answer_message("two")), A, b"long", 10, 0)
    index.apply_report(A, 1, 1, (b"long",))
    assert len(index) == 0
    prompt = chain(user("one"))
    index = known((A, prompt, b"1"), (A, prompt, b"2"), (B, prompt, b"3"))
    index.apply_report(A, 1, 2, (b"2", b"1"))
    assert index.estimate_shares(prompt) == {B: 1.0}


def test_remove_node_keeps_other_nodes_and_deletes_the_history():
    one, two = chain(user("one"), session="a"), chain(user("two"), session="b")
    index = known((A, one, b"1"), (B, two, b"2"))
    index.apply_report(A, 1, 5, (b"x",) * 5)
    index.remove_node(A)
    assert index.estimate_shares(chain(user("?"), session="a")) is NOWHERE
    assert index.estimate_shares(chain(user("????"), session="b")) == {B: 0.8}
    index.apply_report(B, 1, 1, (b"2",))
    assert index.estimate_shares(chain(user("two"))) is NOWHERE
    index.record_prefill(one, A, b"1", 10, 0)
    index.apply_report(A, 1, 1, (b"1",))
    assert index.estimate_shares(chain(user("one"))) is NOWHERE


@given(st.lists(st.text(max_size=3 * BLOCK_CHARS), min_size=1, max_size=100))
def test_a_chain_is_short_and_grows(texts: list[str]):
    links = chain(*map(user, texts)).hashes
    sizes = [size for _, size in links]
    assert len(links) <= MAX_HASHES
    assert sizes == sorted(sizes)
    assert sizes[-1] == chain(*map(user, texts)).size


@given(st.lists(st.text(min_size=1, max_size=50), min_size=1, max_size=10), st.integers(1, 9))
def test_a_beginning_is_never_credited_with_more_than_it_has(texts: list[str], cut: int):
    prompt, begin = chain(*map(user, texts)), chain(*map(user, texts[:cut]))
    share = known((A, begin, HASH)).estimate_shares(prompt)[A]
    assert share == begin.size / prompt.size
