"""A package, so that tests can share helpers: `from tests.quant import oracle`."""
