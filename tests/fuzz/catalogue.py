"""All operations of bodies by name; what draws and comparisons have to know of them."""

from tests.fuzz import algebra, effects, flags, operations
from tests.fuzz.operations import Operation, compact


def of_any_lanes(*branches: Operation) -> list[Operation]:
    """Each in lockstep, and with compact lanes."""
    return [*branches, *map(compact, branches)]


_o, _a, _f, _e = operations, algebra, flags, effects
ALWAYS: list[Operation] = [
    *(_o.product, _o.elementwise, _o.total, _o.count, _o.swap, _o.overwrite, _o.sort, _o.largest, _o.gather),
    *(_o.scatter, _o.cumulative, _o.where, _o.square_root, _o.cond, _o.switch, _o.lax_scan, _o.lax_fori),
    *(_o.inner_loop, _o.inner_loop_of_any_length, _o.inner_while, _o.checkpoint, _o.loop_in_checkpoint),
    *(_o.custom_jvp, _o.custom_vjp, _o.squash, _o.stop_gradient, _o.jit, _o.batch, _o.slope),
    *(_a.solve, _a.cholesky, _a.eigenvalues, _a.linear_solve, _a.root, _a.convolution, _a.spectrum, _a.soft_choice),
    *(_a.outer_product, _a.length, _a.cumulative_product, _a.running_sums, _a.sort_by, _a.order, _a.best_two),
    *(_a.place_of_largest, _a.take_along, _a.slice_of_weights, _a.update_slice, _a.sums_by_place, _a.place_among),
    *(
        _a.rows_of_map,
        _a.inner_rows,
        _a.inner_solves,
        _a.inner_stages,
        _a.loop_in_loop,
        _a.pure_callback,
        _a.rule_for_lanes,
    ),
    *(_a.rule_that_mixes_lanes, _a.inner_rule_that_mixes_lanes),
    *(_f.clipped, _f.guarded_domain, _f.named, _f.checkpoint_with_policy),
    *of_any_lanes(_o.branch, _o.branch_with_a_product, _o.branch_with_a_domain, _o.one_of_three, _o.loop_in_branch),
    *of_any_lanes(_o.branch_in_branch, _f.chosen_in_branch, _f.checkpoint_of_branch),
]
# A letter each. Of `Program.features`; most are a leaf of the carry (`evaluate.py`).
OF_FEATURES: dict[str, list[Operation]] = {
    "z": [_o.complex_product],
    "f": [_o.float32],
    "d": [_o.doubles, _o.doubles_in_branch, _o.doubles_in_inner_loop],  # of a program in 32-bit mode
    "k": [_o.random, *of_any_lanes(_o.random_branch)],
    # A key of `rbg` or `unsafe_rbg`.
    "g": [_o.random_of_lanes, _o.random_in_inner_loop_of_lanes, *of_any_lanes(_o.random_branch_of_lanes)],
    "y": [_o.random_of_loop],  # a key that the loop is given
    "m": [_o.module, _o.trained_module, *of_any_lanes(_o.module_in_branch)],
    "b": [_o.append, _o.newest_of_buffer],
    "h": [_o.push, _o.window, *of_any_lanes(_o.push_in_branch)],
    "r": [_o.write, _o.read, *of_any_lanes(_o.write_in_branch)],
    "a": [_a.wide, _a.wide_products],
    "c": [  # choices by constants, and flags
        *(_f.chosen_by_a_constant, _f.chosen_by_constants, _f.one_of_constants, _f.constant, _f.chosen_scan),
        *(_f.chosen_inner_loop, _f.chosen_result, _f.scan_with_constants, _f.flag_of_scan, _f.flag_of_loop),
        *(_f.flag_of_numbers_outside, _f.flags_of_rows, _f.checkpoint_of_scan),
    ],
    "t": [_f.turn_if, _f.set_flag, *of_any_lanes(_f.branch_on_flag)],
    # Effects that a derivative keeps, that only a program without a derivative has, and in order, also without a batch.
    "e": [
        *(_e.say, _e.say_in_loop_that_changes_nothing, _e.say_in_inner_loop, _e.say_in_scan, _e.say_in_jit),
        *(_e.say_in_checkpoint, _e.say_in_custom_jvp, _e.say_in_custom_vjp, _e.say_in_backward_rule),
        *(_e.tell_in_backward_rule, *of_any_lanes(_e.say_in_branch, _e.say_and_change_nothing)),
    ],
    "i": [_e.tell, _e.ask, _e.ask_in_inner_loop, _e.ask_in_checkpoint, *of_any_lanes(_e.ask_in_branch)],
    "o": [_e.say_in_order, _e.say_in_order_in_branch],
    "p": [_e.row_from_host, _e.there_and_back, _e.branch_on_host],  # rows in host memory
}
# Choices by constants three times: their outputs are literals, which went unseen for long.
CHOICES = [_f.chosen_by_a_constant, _f.chosen_scan, _f.chosen_inner_loop, _f.chosen_result, _f.scan_with_constants]
ALWAYS += [*OF_FEATURES["c"], *CHOICES, *CHOICES]
OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation for group in (ALWAYS, *OF_FEATURES.values()) for operation in group
}
WITH_BACKWARD_EFFECTS = {name for name in OPERATIONS if "backward" in name}
WITHOUT_FORWARD_MODE = {"custom_vjp", "squash", "say_in_custom_vjp", *WITH_BACKWARD_EFFECTS}
WITH_CHECKPOINTS = {name for name in OPERATIONS if "checkpoint" in name}
MIXES_LANES = {"rule_that_mixes_lanes", "inner_rule_that_mixes_lanes"}
BRANCHES = ("branch", "one_of_three", "say_and_change_nothing")
TAKES_BRANCHES = [name for name in OPERATIONS if any(branch in name for branch in BRANCHES)]
