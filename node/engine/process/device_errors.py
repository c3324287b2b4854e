"""Failed command buffers of the GPU: they end the engine process, because MLX reports them late and only once.

MLX keeps the error of a command buffer. A later call, which encodes or awaits further work on the same stream, raises
the error. MLX then forgets the error (mlx#3523, mlx#4174). The call that raises is often not the call that failed. Its
handler would end one request, and other rows would continue from arrays that the GPU never wrote.
After several errors macOS ignores all further work of the process
(`kIOGPUCommandBufferCallbackErrorSubmissionsIgnored`). Before MLX 0.32 such an error aborted the process. See
docs/decisions/0066.
"""

_PREFIX = "[METAL] Command buffer execution failed"
"""Beginning of the message of MLX's `RuntimeError`."""


class DeviceLost(BaseException):
    """Raised instead of an exception of MLX about a failed command buffer. An engine must not catch this: no array that
    was computed since is known to be valid. The text is the message of MLX."""


def raise_if_device_lost(error: BaseException) -> None:
    """Raise `DeviceLost` if `error` reports a failed command buffer.

    Handlers of exceptions in code that calls MLX call this first.
    """
    if is_device_error(error):
        raise DeviceLost(str(error)) from error


def is_device_error(error: BaseException) -> bool:
    """Return whether `error` reports a failed command buffer of the GPU."""
    return isinstance(error, DeviceLost) or (isinstance(error, RuntimeError) and str(error).startswith(_PREFIX))


def describe_device_error(error: BaseException) -> str:
    """Return the reason that macOS gives in `error`, for which `is_device_error` is true."""
    return str(error).removeprefix(_PREFIX).removeprefix(": ").removesuffix(".")
