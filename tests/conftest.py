"""Settings of all tests."""

from hypothesis import settings

# No test asserts a time: an example may take long on a busy machine.
settings.register_profile("npufleet", deadline=None)
settings.load_profile("npufleet")
