"""Errors that the user can cause and mend."""


class UserError(Exception):
    """Something that the user can mend. Its text is one line: what is wrong, where, and what to do."""
