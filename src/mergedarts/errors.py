"""The two kinds of failure: a user's mistake, said in one sentence, and everything else, which keeps its traceback.

Knows nothing of what can go wrong; only how it is carried to the command line.
"""


class UserError(Exception):
    """Bad input. The message is one sentence that names the file, key or model and the mend."""
