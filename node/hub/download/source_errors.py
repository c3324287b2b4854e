"""Errors of a source of model files, by their effect on the download."""

from wire.frames.model_files import ModelOrderCode


class SourceError(Exception):
    """Error of one request to a source. The text is a sentence without secrets."""


class SourceFault(SourceError):
    """Fault that can pass: a lost connection, a body that ended early, or a status that no other error covers."""


class SourcePending(SourceError):
    """Error: the source does not have the range yet, because it still downloads the file. `seconds` is the time to
    wait."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class SourceLimited(SourceError):
    """Error: the source limits the rate of requests. `seconds` is the time to wait."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class SourceRefusal(SourceError):
    """Error: the source refuses permanently and cannot be used for this download.

    `code` is the code of the order's end if no other source is left.
    """

    def __init__(self, code: ModelOrderCode, message: str) -> None:
        super().__init__(message)
        self.code = code
