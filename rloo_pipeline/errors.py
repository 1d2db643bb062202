"""Errors that a user can mend."""


class UserError(Exception):
    """Something in the project's files or settings is wrong; the message says what, where and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class Busy(UserError):
    """Another process holds what this one needs; the same command can succeed later."""
