"""Settings of every test: a property is judged by what it says, not by how long an example takes on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("faser", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("faser")
