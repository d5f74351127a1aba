"""All that is measured, in the order of the page."""

from benchmarks import (
    adaptive,
    branches,
    budgets,
    condition_checks,
    durable,
    evaluations,
    everyday,
    finite,
    first_step,
    foretold,
    histories,
    lanes,
    long_gradients,
    models,
    progress,
    ragged,
    reads,
    recurrences,
    replays,
    samplers,
    second_derivatives,
    sharded,
    small_bodies,
    stochtrace,
    stochtrace_errors,
    stochtrace_intervals,
    storeless,
    streams,
    transformed_rows,
    truncated,
    ways,
)
from benchmarks.groups import Item

WITH_GROUPS = (
    recurrences,
    replays,
    storeless,
    truncated,
    lanes,
    ways,
    branches,
    reads,
    ragged,
    samplers,
    budgets,
    second_derivatives,
    models,
    adaptive,
    histories,
    progress,
    stochtrace,
    small_bodies,
)
WITH_TABLES = (
    ways,
    evaluations,
    everyday,
    finite,
    first_step,
    foretold,
    reads,
    transformed_rows,
    stochtrace,
    stochtrace_errors,
    stochtrace_intervals,
    streams,
    durable,
    long_gradients,
    sharded,
    condition_checks,
)
WITH_COUNTS = (ragged, histories)


def items() -> list[Item]:
    """Programs that are compared, other tables, and counts."""
    return [
        *(group for module in WITH_GROUPS for group in module.groups()),
        *(table for module in WITH_TABLES for table in module.tables()),
        *(counts for module in WITH_COUNTS for counts in module.counts()),
    ]


def chosen(part: str) -> list[Item]:
    """Those whose title contains `part`."""
    return [item for item in items() if part in item.title]
