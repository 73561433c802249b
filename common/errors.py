"""The errors whose message is all that a user needs to see: no traceback is printed with them."""


class UserError(ValueError):
    """Something the user can fix. Every command prints its message alone and exits with status 2."""


class RunError(RuntimeError):
    """The run cannot go on. train.py prints its message alone and exits with status 1."""
