"""The one exception of this package: anything that a caller can cause."""


class QuantError(ValueError):
    """A request that cannot be met; the message is one line that says what, where and what to do."""
