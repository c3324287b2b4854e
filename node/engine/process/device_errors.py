"""Errors of failed GPU command buffers, which end the engine process because MLX reports them late and only once.

MLX keeps the error of a command buffer. A later call, which encodes or awaits further work on the same stream, raises
the error. MLX then discards the error (mlx#3523, mlx#4174). The call that raises is often not the call that failed. If
the engine handled the error, one request would end, and other rows would continue from arrays that the GPU never wrote.
After several errors macOS ignores all further work of the process
(`kIOGPUCommandBufferCallbackErrorSubmissionsIgnored`). Before MLX 0.32 such an error aborted the process. See
docs/decisions/0066.
"""

_PREFIX = "[METAL] Command buffer execution failed"
"""Prefix of the message of MLX's `RuntimeError`."""


class DeviceLost(BaseException):
    """Raised instead of an exception of MLX about a failed command buffer. An engine must not catch it, because arrays
    that were computed since may be invalid. The text is the message of MLX."""


def raise_if_device_lost(error: BaseException) -> None:
    """Raise `DeviceLost` if `error` reports a failed command buffer.

    Every handler of exceptions in code that calls MLX must call this first.
    """
    if is_device_error(error):
        raise DeviceLost(str(error)) from error


def is_device_error(error: BaseException) -> bool:
    """Return whether `error` reports a failed command buffer of the GPU."""
    return isinstance(error, DeviceLost) or (isinstance(error, RuntimeError) and str(error).startswith(_PREFIX))


def describe_device_error(error: BaseException) -> str:
    """Return the reason in `error`, an error for which `is_device_error` is true, without the prefix of MLX."""
    return str(error).removeprefix(_PREFIX).removeprefix(": ").removesuffix(".")
