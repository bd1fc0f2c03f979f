"""What a command can end with; each class is one exit code."""


class PatchsetError(Exception):
    """Base of every failure that is told in one line.

    Attributes:
        exit_code: the process's exit status.
        details: further lines, printed below the first.
    """

    exit_code = 1

    def __init__(self, message: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.details = details


class Conflict(PatchsetError):
    """The tree is not what a patch expects, or could not be written. Nothing was changed."""

    exit_code = 1


class UsageError(PatchsetError):
    """The command, the series or the target is not usable as given."""

    exit_code = 2


class SourceUnavailable(PatchsetError):
    """An upstream source could not be had: no network, wrong hash, damaged or hostile archive."""

    exit_code = 3
