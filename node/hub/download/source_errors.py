"""Errors of requests to a source of model files, classified by their effect on the download."""

from wire.frames.model_files import ModelOrderCode


class SourceError(Exception):
    """Base of the errors of one request to a source. The text is a sentence without secrets."""


class SourceFault(SourceError):
    """Raised for a temporary fault: a lost connection, a body that ended early, or a status without another error."""


class SourcePending(SourceError):
    """Raised if the source does not have the range yet, because the source itself still downloads the file.

    `seconds` is the time to wait.
    """

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class SourceLimited(SourceError):
    """Raised if the source limits the rate of requests. `seconds` is the time to wait."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class SourceRefusal(SourceError):
    """Raised if the source refuses permanently and cannot be used for this download.

    `code` is the code of the order's end if no other source is left.
    """

    def __init__(self, code: ModelOrderCode, message: str) -> None:
        super().__init__(message)
        self.code = code
