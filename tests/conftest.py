"""Settings of every test: a property is judged by what it says, not by how long an example takes on a busy machine, and
by the same examples every time, so that a failure is the change's; FASER_RANDOM=1 draws new ones."""

import os
import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; some tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "faser",
    deadline=None,
    derandomize=not os.environ.get("FASER_RANDOM"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("faser")
