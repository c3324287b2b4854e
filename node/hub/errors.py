"""Errors that end an order about model files, and the errors for refusals of the hub."""

from wire.frames.model_files import ModelOrderCode


class ModelFileError(Exception):
    """Raised to end an order about model files. The text is one sentence with the next step, without secrets.

    `code` is the `ModelOrderCode` that the node reports. `retry_after` is the minimum number of seconds before the next
    try; 0 if unknown.
    """

    def __init__(self, code: ModelOrderCode, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


class OrderStopped(Exception):
    """Raised in a child process whose order was cancelled, or whose agent has ended."""


def describe_refusal(status: int, error_code: str, subject: str, *, has_token: bool) -> ModelFileError | None:
    """Return the error for a refusal of the hub; None if the status is not a refusal.

    `status` is the HTTP status, `error_code` the value of `X-Error-Code`. `subject` names the repository, with its
    revision or file. `has_token` is whether a token was sent.
    """
    if error_code == "GatedRepo":
        hint = "accept its terms on its page with the account of the token" if has_token else "it needs a token"
        return ModelFileError(ModelOrderCode.GATED, f"{subject} is gated: {hint}")
    if error_code == "RepoNotFound" or (status == 404 and not error_code):
        hint = "the token may not read it" if has_token else "it is private and needs a token"
        return ModelFileError(ModelOrderCode.NOT_FOUND, f"{subject} does not exist, or {hint}: check the name")
    if status in (404, 410):
        return ModelFileError(ModelOrderCode.NOT_FOUND, f"{subject} does not exist: check its revision and file names")
    if status in (401, 403):
        hint = "the hub refuses the token: create another one" if has_token else "it needs a token"
        return ModelFileError(ModelOrderCode.GATED, f"{subject} may not be read: {hint}")
    return None
