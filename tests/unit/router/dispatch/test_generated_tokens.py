"""Token ids that a request has received."""

import pytest

from router.dispatch.generated_tokens import GeneratedTokens
from router.placement.recovery import MAX_KNOWN_TOKENS
from wire.frames import Delta


@pytest.mark.parametrize("choices", [0, 1, 3])
def test_a_restarted_answer_begins_without_tokens(choices: int):
    tokens, empty = GeneratedTokens(choices, 9), [[] for _ in range(max(choices, 1))]
    assert (tokens.ids, tokens.unbegun, tokens.longest, tokens.total, tokens.get_ids()) == (empty, True, 0, 0, ())
    tokens.ids[0] += [1, 2]
    tokens.discard_ids(Delta(1, 7, (3,), ()))
    assert (tokens.ids, tokens.unbegun, tokens.longest, tokens.total, tokens.get_ids()) == ([], False, 0, 3, ())
    tokens.restart()
    assert (tokens.ids, tokens.unbegun, tokens.longest, tokens.total) == (empty, True, 0, 0)


def test_the_longest_choice_counts_for_a_resume_and_all_count_as_generated():
    tokens = GeneratedTokens(3, 9)
    tokens.ids[0].append(1)
    tokens.ids[2] += [2, 3]
    assert (tokens.longest, tokens.total, tokens.unbegun) == (2, 3, False)
    assert tokens.get_ids() == ((1,), (), (2, 3))
    tokens.count_foreign(4)
    tokens.count_foreign(1)
    assert (tokens.longest, tokens.total) == (2, 8), "tokens of an upstream have no ids"


@pytest.mark.parametrize(("limit", "most"), [(2, 2), (None, MAX_KNOWN_TOKENS), (10**7, MAX_KNOWN_TOKENS)])
def test_ids_beyond_the_limit_of_a_choice_are_discarded_and_stay_counted(limit: int | None, most: int):
    tokens = GeneratedTokens(2, limit)
    tokens.ids[1] += [7] * most
    tokens.discard_excess()
    assert tokens.longest == most
    tokens.ids[1].append(7)
    tokens.discard_excess()
    assert (tokens.ids, tokens.total) == ([], most + 1)
