"""The few exceptions a user can meet; every message names the thing, the value and the way out."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else says, in one line; its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ProxreplayError(Exception):
    """Base of all errors that proxreplay raises on purpose."""


class InputError(ProxreplayError, ValueError):
    """A value handed in cannot be used; nothing was changed."""


class DivergenceError(ProxreplayError, ArithmeticError):
    """The loss or a gradient of a step is not finite; the step was not made."""


class RefreshError(ProxreplayError, RuntimeError):
    """A rule could not be refreshed; the previous preconditioner stays in force."""


class DataError(ProxreplayError):
    """A data set is missing, damaged or not what it should be."""


class CheckpointError(ProxreplayError):
    """A saved state is missing, damaged or foreign, or could not be written."""


class StorageError(ProxreplayError):
    """Something could not be written; what was there before is intact."""


class ProcessError(ProxreplayError, RuntimeError):
    """Another process of those that learn together failed, was lost, or holds something else."""


class ConflictError(InputError):
    """An idempotency key was given before, with something else; nothing was changed."""


class BusyError(ProxreplayError):
    """Too much waits to be learned; nothing was changed. Come back later."""


class StoppedError(ProxreplayError):
    """Learning was stopped by a guard or a failure; nothing was changed."""
