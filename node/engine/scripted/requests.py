"""Requests of the scripted engine: their sizes, their answers, and the words that make the engine refuse or crash."""

from node.engine.kv.commitments import CommitmentLedger
from node.engine.requests import preflight
from node.engine.scripted import answers
from node.engine.scripted.sequence import ScriptedSequence, TextRow
from node.engine.text.stop_strings import StopStrings
from node.settings import ScriptedSettings
from wire.frames import Generate


class ScriptedRequests:
    """Factory of the scripted engine's sequences. The settings determine their sizes, answers, refusals and crashes.

    Rows are committed in `ledger`. `now` is in monotonic seconds.
    """

    def __init__(self, settings: ScriptedSettings, ledger: CommitmentLedger) -> None:
        self._settings = settings
        self._ledger = ledger

    def list_pieces(self, request: Generate, prompt: int) -> list[str]:
        """Return the texts of the tokens of an echo. Return an empty list if `engine.scripted.text` is not `echo`, or
        if the context has no room for an answer after the `prompt` prompt tokens."""
        echo = self._settings.text == "echo" and prompt < self._settings.max_context
        return answers.split_echo(answers.get_messages(request)) if echo else []

    def compute_shape(self, request: Generate, prompt: int, pieces: list[str]) -> preflight.RequestShape:
        """Return the size of a request in tokens and choices. `prompt` is the number of its prompt tokens, `pieces` the
        result of `list_pieces`."""
        natural = len(pieces) or self._settings.tokens
        return preflight.compute_shape(request, prompt, natural, self._settings.max_context)

    def must_refuse(self, request: Generate) -> bool:
        """Return whether a request must be refused according to the setting `engine.scripted.refuse`."""
        word = self._settings.refuse
        return word == "*" or (bool(word) and answers.contains_word(answers.get_messages(request), word))

    def create_sequence(
        self, request: Generate, shape: preflight.RequestShape, pieces: list[str], now: float
    ) -> ScriptedSequence:
        """Return the sequence of a request, with its rows and their commitments. Resumed rows contain the tokens that
        another node has sent. A row whose answer these tokens complete has ended, and has no commitment."""
        word = self._settings.crash
        crashes = bool(word) and answers.contains_word(answers.get_messages(request), word)
        unlimited = request.params.max_tokens is None
        ends = len(pieces) or (self._settings.tokens if unlimited else shape.limit + 1)
        sequence = ScriptedSequence(
            request=request, shape=shape, ledger=self._ledger, ends=ends, crashes=crashes, arrived=now
        )
        for choice, commitment in enumerate(self._ledger.commit(shape.length, shape.choices)):
            row = TextRow(
                choice=choice,
                commitment=commitment,
                stops=StopStrings(request.params.stop),
                token_source=self._create_token_source(pieces, choice),
            )
            row.replay(sequence.number, request.get_known_ids(choice), now, ends=ends, limit=shape.limit)
            if row.reason:
                self._ledger.release(row.commitment)
            sequence.rows.append(row)
        return sequence

    def _create_token_source(self, pieces: list[str], choice: int) -> answers.TokenSource:
        if pieces:
            return answers.create_echo_source(pieces)
        return answers.make_clock_token if self._settings.text == "clock" else answers.create_word_source(choice)
