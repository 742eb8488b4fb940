"""Runs requests to their end on toy engines, and says what the executor counted."""

from tests.support.executor_harness import Collector


def drive(setup, requests):
    """requests: (prompt, params) -> tokens by request id, stats."""
    executor, collector = setup.open(), Collector()
    with executor:
        for index, (prompt, params) in enumerate(requests):
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        while executor.step():
            setup.clock.advance(0.001)
            executor.check_integrity()
        return collector.tokens, executor.stats()
