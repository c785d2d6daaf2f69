"""How long tests wait before they call something hung: every bound of time of the tests is here, and none is tight.

Tests run beside other work: at a load of 14 on two cores a step takes seven times as long as alone. ``pytest``'s own
``timeout`` in pyproject.toml is longer than all of these, so that what hangs is reported by those who know its ranks.
"""

from __future__ import annotations

import os

_PATIENCE = float(os.environ.get("PYG_DIST_TEST_PATIENCE", "1"))

# Ranks that have used no processor time for so long wait for one another, or for nothing.
STALL_SECONDS = 60.0 * _PATIENCE
# Ranks that do use it are in an endless loop after so long. The longest body takes ten seconds alone.
BODY_SECONDS = 600.0 * _PATIENCE
# After one rank has failed, the others get so long to end their body before their stacks are dumped.
GRACE_SECONDS = 3.0 * _PATIENCE
# A launched script or command, and dumping a stack.
COMMAND_SECONDS = 600.0 * _PATIENCE
# The timeout of a session of which a test shows that it is kept, or not taken: the session starts within it.
TIMEOUT_SECONDS = 4.0 * _PATIENCE
DUMP_SECONDS = 20.0 * _PATIENCE
