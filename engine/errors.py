"""The one exception of this package: anything that a caller, a model or a text can cause."""


class EngineError(ValueError):
    """A request that cannot be met; the message is one line that says what, where and what to do."""
