"""The two kinds of failure: a user's mistake, said in one sentence, and everything else, which keeps its traceback.

Knows nothing of what can go wrong; only how it is carried to the command line.
"""


class UserError(Exception):
    """Bad input. The message is one sentence that names the file, key or model and the mend."""


class NoSpaceError(UserError):
    """A full disk, a quota or a limit on file size; whoever knows the user's own name for the place says it again."""

    def __init__(self, place: object) -> None:
        super().__init__(f"No space left to write {place}; free some, or name another disk.")
