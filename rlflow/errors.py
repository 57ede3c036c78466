"""The one kind of error that a user can mend."""


class UserError(ValueError):
    """What a user did and can mend, in one line: what was found, why it cannot work, what to do.

    The command line prints the message without a traceback and exits with 2.
    """
