"""Settings of the test run that no single package owns."""

from hypothesis import HealthCheck, settings

# A deadline is an assertion about time, and a shared machine breaks those: examples are limited by number instead.
settings.register_profile("llmstack", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("llmstack")
