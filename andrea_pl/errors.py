"""The error for everything that the user can fix, as opposed to a bug in this library."""


class UserError(ValueError):
    """Something is wrong with the input, the configuration or the machine, and the user can fix it.

    The message names the file, key or value and what to do. The command prints it without a traceback.
    """
