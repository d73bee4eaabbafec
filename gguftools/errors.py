"""The one exception of this package: anything that a user can cause."""


class GGUFError(ValueError):
    """A request that cannot be met; the message is one line that says what, where and what to do."""
