"""Requests that wait before their admission: for the load of their model, or for a tokenization by a prompt thread."""

from collections.abc import Collection
from dataclasses import dataclass

from node.engine.models.model_stats import ModelHold
from node.engine.requests.prepared import PreparedEmbedding, PreparedRequest


@dataclass(frozen=True, slots=True)
class WaitingForModel:
    """Request that waits for the load of its model."""

    prepared: PreparedRequest | PreparedEmbedding
    """The request."""
    arrived: float
    """Monotonic time of the request's arrival."""
    reserved_bytes: int
    """KV bytes of the request's rows after the load, which count as reserved until then."""

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.prepared.request.model


class WaitingRequests:
    """Requests that wait for their model, and prompts in tokenization. Their memory counts as reserved.

    `len` counts both; `in` finds only requests that wait for their model.
    """

    def __init__(self) -> None:
        self._for_model: dict[int, WaitingForModel] = {}
        self._in_tokenization: dict[int, tuple[int, ModelHold | None]] = {}

    def __len__(self) -> int:
        return len(self._for_model) + len(self._in_tokenization)

    def __contains__(self, number: int) -> bool:
        return number in self._for_model

    def count_tokens(self) -> int:
        """Return the prompt tokens of all requests that wait for their model."""
        return sum(waiting.prepared.tokens for waiting in self._for_model.values())

    def compute_reserved_bytes(self) -> int:
        """Return the bytes that are reserved for requests that wait for their model, and for tokenizations."""
        rows = sum(waiting.reserved_bytes for waiting in self._for_model.values())
        return rows + sum(need for need, _ in self._in_tokenization.values())

    # for their model

    def add(self, number: int, waiting: WaitingForModel) -> None:
        """Add a request that waits for its model."""
        self._for_model[number] = waiting

    def remove(self, number: int) -> bool:
        """Remove the request `number`, if it waits for its model. Return whether it was removed."""
        return self._for_model.pop(number, None) is not None

    def take_next(self, model: str) -> WaitingForModel | None:
        """Remove and return the oldest request that waits for a model; None if there is none. The bytes of later
        requests stay reserved."""
        return self._for_model.pop(self.find_first(model), None)

    def is_awaited(self, model: str) -> bool:
        """Return whether a request waits for this model."""
        return any(waiting.model == model for waiting in self._for_model.values())

    def find_first(self, model: str) -> int:
        """Return the number of the oldest request that waits for a model; 0 if there is none."""
        return next((number for number, waiting in self._for_model.items() if waiting.model == model), 0)

    # in tokenization

    @property
    def in_tokenization(self) -> Collection[int]:
        """Numbers of the prompts in tokenization."""
        return self._in_tokenization.keys()

    def begin_tokenization(self, number: int, hold: ModelHold | None) -> None:
        """Add a prompt in tokenization, with 0 reserved bytes until `reserve`. `hold` keeps its model in memory; None
        if the model is not loaded.
        """
        self._in_tokenization[number] = (0, hold)

    def reserve(self, number: int, need: int) -> None:
        """Reserve `need` bytes for the tokenization of a prompt. Raise `KeyError` if it is not in tokenization."""
        _, hold = self._in_tokenization[number]
        self._in_tokenization[number] = (need, hold)

    def end_tokenization(self, number: int) -> None:
        """Release the reserved memory of a prompt and its hold on the model after the tokenization. An unknown number
        is ignored."""
        _, hold = self._in_tokenization.pop(number, (0, None))
        if hold is not None:
            hold.release()
