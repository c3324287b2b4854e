"""Requests of the scripted engine: their sizes, their answers, and the words that make it refuse or crash."""

from node.engine.kv.commitments import CommitmentLedger
from node.engine.requests import preflight
from node.engine.scripted import answers
from node.engine.scripted.sequence import ScriptedRow, ScriptedSequence
from node.engine.text.stop_strings import StopStrings
from node.settings import ScriptedSettings
from wire.frames import Generate


class ScriptedRequests:
    """Maker of sequences by script. Rows are committed in `ledger`."""

    def __init__(self, settings: ScriptedSettings, ledger: CommitmentLedger) -> None:
        self._settings = settings
        self._ledger = ledger

    def pieces(self, request: Generate, prompt: int) -> list[str]:
        """Return the tokens of an echo; empty in the other modes, and for a prompt of `prompt` tokens that will be
        refused."""
        echo = self._settings.text == "echo" and prompt < self._settings.max_context
        return answers.echo_pieces(answers.message_texts(request)) if echo else []

    def shape(self, request: Generate, prompt: int, pieces: list[str]) -> preflight.RequestShape:
        """Return the size of a request. `prompt` is the number of its prompt tokens, `pieces` the result of
        `pieces`."""
        natural = len(pieces) or self._settings.tokens
        return preflight.compute_shape(request, prompt, natural, self._settings.max_context)

    def must_refuse(self, request: Generate) -> bool:
        """Return whether the script refuses a request."""
        word = self._settings.refuse
        return word == "*" or (bool(word) and answers.mentions(answers.message_texts(request), word))

    def sequence(
        self, request: Generate, shape: preflight.RequestShape, pieces: list[str], now: float
    ) -> ScriptedSequence:
        """Create the rows of a request with their commitments; resumed rows contain their known tokens."""
        word = self._settings.crash
        crashes = bool(word) and answers.mentions(answers.message_texts(request), word)
        rows = [
            ScriptedRow(choice, commitment, StopStrings(request.params.stop), self._token_source(pieces, choice))
            for choice, commitment in enumerate(self._ledger.commit(shape.length, shape.choices))
        ]
        unlimited = request.params.max_tokens is None
        ends = len(pieces) or (self._settings.tokens if unlimited else shape.limit + 1)
        sequence = ScriptedSequence(request, shape, ends, crashes, now, rows)
        for row in rows:
            self._replay(sequence, row, now)
        return sequence

    def _replay(self, sequence: ScriptedSequence, row: ScriptedRow, now: float) -> None:
        """Restore a row after the ids that another node has sent: their text is not sent again."""
        for _ in sequence.request.known(row.choice):
            sequence.add_token(row, now)
            if row.reason:
                self._ledger.release(row.commitment)
                break
        row.end_replay()

    def _token_source(self, pieces: list[str], choice: int) -> answers.TokenSource:
        if pieces:
            return answers.echo_tokens(pieces)
        return answers.clock_tokens if self._settings.text == "clock" else answers.fixed_words(choice)
