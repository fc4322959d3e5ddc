"""Is the last import of the server from which commands are forked (tests/support/commands.py)."""

from tests.support.economy import economize

economize()
