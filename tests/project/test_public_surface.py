"""All that is public: names, their arguments in order, and what their objects have. A change of it changes this."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from textwrap import wrap
from typing import Any

MODULES = ["loopax", "loopax.kinds", "loopax.durable", "loopax.stochtrace", "loopax.insight", "loopax.schedule"]
# `=`: there is a default. `*`: only by name from here on.
SURFACE = """
loopax:
  Auto(memory=, num_lanes=)
    plan(loop)
  AutoLanes(counts=)
  Bounded()
    needs_bound
    plan(loop)
    cost(loop)
  Buffer(capacity, *, like)
    append(row, *, when=)
    mask
    rows
  Checkpointed(checkpoints=)
    plan(loop)
    cost(loop)
  Compact(shrink=, min_lanes=)
  Comparison(name, rows)
    plot(axes=)
  Derivative()
    differs
    uses_kind
    run(call)
    in_words(kind)
    without_functions()
  Explanation(name, differentiated, loops, problem)
    warnings
    walk()
    show()
  Free()
  History(k, rows=, *, like=, fill=)
    push(row)
    count
    mask
  Implicit(linear_solver=, fixed_point=, rtol=, atol=, unsolved=)
    differs
    uses_kind
    in_words(kind)
    without_functions()
    run(call)
  Kind()
    needs_bound
    inverse
    record
    plan(loop)
    in_words()
    without_functions()
    cost(loop)
  LaneReport(steps, lockstep, groups, stages, sequential, nested, free)
    useful
    share(stretches)
    plot(stretches=, axes=)
  Lanes()
  LanesStream(working, items, ordered, throw, resume)
    close()
    suspend()
    report()
  Lax()
    plan(loop)
  Lockstep()
  LoopInfo(num_steps, limit_reached, broken=, broken_step=, broken_leaf=)
  Progress(label=, every=, style=)
  Residuals()
    needs_bound
    plan(loop)
    cost(loop)
  Reversible(inverse=, *, record=, checkpoints=, rtol=)
    plan(loop)
    cost(loop)
    in_words()
    without_functions()
  Rollout(state, outputs, num_steps)
  Sequential()
  StreamInfo(num_steps, limit_reached, error)
  StreamReport(items, lanes, iterations, useful, iterations_fed, useful_fed, seconds)
    share
    share_fed
  SuspendedStream(unfinished, lanes, state, results, fetched, next_result)
  Truncated(last=, window=)
    in_words(kind)
    run(call)
  Tuned(memory=, cache=, num_lanes=)
    plan(loop)
  compare(fn, *args, kinds=, argnums=, rounds=, cache=)
  cond(pred, true_fun, false_fun, *operands, operand=, lanes=)
  configure(*, memory=, calibration=)
  durable
  explain(fn, *args, argnums=)
  fori_loop(lower, upper, body_fun, init_val, *, max_steps=, kind=, derivative=, lanes=, unroll=, key=, throw=, info=,
      progress=, finite=)
  lane_report(info, inner=, *, lanes=, blocks=)
  lanes_map(f, xs, *, num_lanes=)
  lanes_stream(f, items, *, num_lanes=, ordered=, chunk_steps=, prefetch=, throw=, info=, resume=, progress=)
  local(module)
  rewrite_loops(fn, *, max_steps=, kind=, lanes=, scans=, conds=, finite=)
  rollout(step, state, length=, *, max_steps=, kind=, derivative=, lanes=, inputs=, history=, stop=, save_every=,
      unroll=, key=, throw=, info=, progress=, finite=)
  scan(f, init, xs=, length=, reverse=, unroll=, *, max_steps=, kind=, derivative=, lanes=, stop=, key=, throw=,
      info=, progress=, finite=)
  sharded_lanes(f, mesh, axis, *, in_axes=, out_axes=)
  stochtrace
  switch(index, branches, *operands, operand=, lanes=)
  while_loop(cond_fun, body_fun, init_val, *, max_steps=, kind=, derivative=, lanes=, key=, throw=, info=, progress=,
      finite=)
loopax.kinds:
  Checkpoints(checkpoints=, always_to_bound=, reason=)
    name
  Cost(memory, time, stored=)
  EveryCarry(reason=)
    needs_bound
  EveryResidual(reason=, keeps_all=)
    stores_residuals
    needs_bound
  LastCarry(otherwise=, reason=)
    walks_back
  LoopCall(loop, operands, is_fixed, where, unpack, checked)
    run()
    step(row, carry, x=)
    at(operands)
    stored_by(kind)
  LoopFacts(bound, is_fixed, bound_is_loose, length_is_known, sizes_are_known, share, writes_rows, ends_early=,
      is_batch=, lanes_to_come=, lanes_apart=, lanes=)
    step
    residuals
  LoopOperands(low, high, consts, carry, xs)
  NoReverseMode(error_type, message, reason=)
    error
  Outcome(num_steps, carry, ys, saved, checkpoint_rows)
    leaves
  Plan()
    reason
    stores_residuals
    keeps_all
    walks_back
    needs_bound
    name
    error
    because(reason)
  ResidualFacts(stored_bytes, derivative=)
  StepFacts(carry_bytes, evaluation, overhead=, derivative=)
loopax.durable:
  AnotherProgramWarning(...)
  DamagedSaveWarning(...)
  GradientInfo(num_steps, chunk_steps, kind, evaluations, states_on_disk, states_in_memory, state_bytes, evaluated,
      bytes_written, bytes_read, hidden, more_disk)
  Gradients(params, init, xs=)
  Rows(path, shape, dtype, key_impl=, metadata=, written=)
    ndim
    nbytes
  SaveError(...)
  StreamOutputs(items, failed, results)
  fori_loop(lower, upper, body_fun, init_val, *, directory, max_steps=, checkpoint_every=, keep=, resume=,
      chunk_steps=, unroll=, key=, throw=, info=, progress=, finite=)
  lanes_stream(f, items, *, directory, num_lanes=, checkpoint_every=, keep=, resume=, chunk_steps=, prefetch=, throw=,
      progress=)
  outputs(directory)
  scan(f, init, xs=, length=, reverse=, unroll=, *, directory, max_steps=, checkpoint_every=, keep=, resume=,
      chunk_steps=, stop=, key=, throw=, info=, progress=, finite=)
  steps_saved(directory)
  value_and_grad(loss, f, *, directory, kind=, loop=, length=, cond_fun=, disk=, memory=, cotangents=, argnums=,
      checkpoint_every=, resume=, chunk_steps=, progress=, info=)
  while_loop(cond_fun, body_fun, init_val, *, directory, max_steps=, checkpoint_every=, keep=, resume=, chunk_steps=,
      key=, throw=, info=, progress=, finite=)
loopax.stochtrace:
  Estimator(probes=)
    products_per_sample
  HutchPlusPlus(probes=)
    products_per_sample
  Hutchinson(probes=)
  TraceEstimate(value, std_error, num_matvecs, converged, num_samples, skewness)
    interval(level=)
  XNysTrace(probes=, positive_semidefinite=)
  XTrace(probes=)
    products_per_sample
  estimate_trace(operator, key, *, estimator=, num_matvecs=, rtol=, atol=, max_matvecs=, batch=, size=)
loopax.insight:
  Advice(name, source, message)
  Comparison(name, rows)
    plot(axes=)
  Leaf(name, role, shape, dtype, size, is_stored, is_differentiated)
  LoopExplanation(function, source, kind, lanes, most_steps, is_fixed, leaves, waiting, derivative, in_words, stored,
      stored_bytes, problem, warnings, inner, branch=, mixed_by=, lanes_expected=, lanes_taken=, blocks=, operations=)
    walk()
  Measured(name, forward_ms=, gradient_ms=, compile_seconds=, temporary_bytes=, traces=, problem=, is_chosen=)
  Stored(kind, reason, what, carries, size, records, walks_back, leaves, evaluations)
loopax.schedule:
  Action(name, step)
  SchedulePicture(num_steps, records=)
    name
    actions
    forward
    derivatives
    replays
    evaluations
    most_stored
    room
  binomial(length, checkpoints, records=)
  online(checkpoints)
  picture(length, checkpoints=, *, length_known=, residuals=)
  replay(stored, length, checkpoints, records=)
"""


def arguments(function: Any) -> str:
    """In their order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # an exception
        return "..."
    texts, by_name = [], False
    for p in parameters:
        if p.name == "self" or p.name.startswith("_"):
            continue
        if p.kind is p.KEYWORD_ONLY and not by_name:
            by_name = True
            texts += ["*"] if not any(text.startswith("*") for text in texts) else []
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        texts.append(stars + p.name + "=" * (p.default is not p.empty))
    return ", ".join(texts)


def members(cls: type) -> Iterator[str]:
    """What a class adds to its bases, but for its fields, which are arguments."""
    fields = (
        [*inspect.signature(cls).parameters, *getattr(cls, "_fields", ())] if not issubclass(cls, Exception) else []
    )
    for name, value in vars(cls).items():
        if name.startswith("_") or name in fields:
            continue
        is_function = inspect.isfunction(value) or isinstance(value, staticmethod | classmethod)
        yield f"    {name}({arguments(getattr(cls, name))})" if is_function else f"    {name}"


def surface() -> Iterator[str]:
    for module in map(import_module, MODULES):
        yield f"{module.__name__}:"
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.ismodule(value):
                yield f"  {name}"
                continue
            yield from wrap(f"  {name}({arguments(value)})", 118, subsequent_indent="      ")
            if inspect.isclass(value):
                yield from members(value)


def test_all_that_is_public() -> None:
    assert list(surface()) == SURFACE.strip("\n").splitlines()
