"""The one kind of error that is the user's to mend, told apart from a fault of ours."""


class UserError(ValueError):
    """Something in the input, the configuration or the machine that the user can put right.

    The message names the file, key or value and what to do. The command prints it without a traceback.
    """
