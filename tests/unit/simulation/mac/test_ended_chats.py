"""Cached chats of a simulated node: their bytes, their keys in reports, and which chat is evicted."""

from simulation.mac.ended_chats import MAX_EVICTIONS_REPORTED, MAX_KEY_BYTES, EndedChat, EndedChats, make_chat_key


def test_bytes_and_counts_follow_each_change():
    chats = EndedChats()
    assert not chats
    for name, size in (("a", 10), ("b", 20), ("c", 40)):
        chats.put(name, EndedChat("chat", 100, size))
    assert (chats.nbytes, bool(chats)) == (70, True)
    chats.discard("b")
    chats.discard("gone")
    report = chats.to_report()
    assert (report.nbytes, report.entries, report.evictions, report.evicted) == (50, 2, 0, ())
    chats.evict_oldest()
    report = chats.to_report()
    assert (report.nbytes, report.entries, report.evictions, report.evicted) == (40, 1, 1, (b"a",))
    chats.evict_oldest()
    assert (chats.nbytes, bool(chats)) == (0, False)


def test_a_chat_is_found_for_its_session_and_its_model_except_for_the_last_token():
    chats = EndedChats()
    chats.put("a", EndedChat("chat", 100, 10))
    assert [chats.find("a", "chat", prompt) for prompt in (50, 100, 101, 500)] == [49, 99, 100, 100]
    assert [chats.find("a", "other", 500), chats.find("b", "chat", 500), chats.find("", "chat", 500)] == [0, 0, 0]


def test_a_used_chat_is_evicted_last():
    chats = EndedChats()
    for name in "abc":
        chats.put(name, EndedChat("chat", 100, 10))
    chats.use("a")
    chats.use("gone")
    for _ in range(3):
        chats.evict_oldest()
    assert chats.to_report().evicted == (b"b", b"c", b"a")


def test_the_key_is_the_end_of_the_session_and_the_newest_evictions_are_reported():
    assert make_chat_key("ada-chat-7") == b"ada-chat-7"
    assert make_chat_key("x" * 40 + "7") == b"x" * (MAX_KEY_BYTES - 1) + b"7"
    chats, count = EndedChats(), MAX_EVICTIONS_REPORTED + 3
    for number in range(count):
        chats.put(f"{number}", EndedChat("chat", 100, 10))
        chats.evict_oldest()
    report = chats.to_report()
    assert (report.evictions, len(report.evicted)) == (count, MAX_EVICTIONS_REPORTED)
    assert (report.evicted[0], report.evicted[-1]) == (b"3", f"{count - 1}".encode())
