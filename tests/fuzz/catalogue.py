"""All operations of bodies by name; what draws and comparisons have to know of them."""

from tests.fuzz import algebra, effects, flags, operations
from tests.fuzz.loops import Operation


def of_any_lanes(*branches: str) -> list[str]:
    """Each in lockstep, and with compact lanes."""
    return [*branches, *(f"compact_{name}" for name in branches)]


def function_of(name: str) -> Operation:
    """The operation; one that begins with "compact_" has branches of compact lanes."""
    if name.startswith("compact_"):
        operation = function_of(name.removeprefix("compact_"))
        return lambda c, x, w, loops: operation(c, x, w, loops.with_compact_branches())
    return next(
        module.SHORT.get(name) or getattr(module, name)
        for module in (operations, algebra, flags, effects)
        if name in module.SHORT or hasattr(module, name)
    )


ALWAYS: list[str] = [
    *("product", "elementwise", "total", "count", "swap", "overwrite", "sort", "largest", "gather"),
    *("scatter", "cumulative", "where", "square_root", "cond", "switch", "lax_scan", "lax_fori"),
    *("inner_loop", "inner_loop_of_any_length", "inner_while", "checkpoint"),
    *("custom_jvp", "custom_vjp", "squash", "stop_gradient", "jit", "batch", "slope"),
    *("solve", "eigenvalues", "linear_solve", "root", "running_sums", "sort_by", "take_along", "slice_of_weights"),
    *("rows_of_map", "inner_rows", "inner_solves", "inner_stages", "loop_in_loop", "pure_callback", "rule_for_lanes"),
    *("rule_that_mixes_lanes", "inner_rule_that_mixes_lanes"),
    *("clipped", "guarded_domain", "named", "checkpoint_with_policy"),
    *of_any_lanes("branch", "branch_with_a_product", "branch_with_a_domain", "one_of_three", "loop_in_branch"),
    *of_any_lanes("branch_in_branch", "checkpoint_of_branch"),
]
# A letter each. Of `Program.features`; most are a leaf of the carry (`evaluate.py`).
OF_FEATURES: dict[str, list[str]] = {
    "z": ["complex_product"],
    "f": ["float32"],
    "d": ["doubles", "doubles_in_branch", "doubles_in_inner_loop"],  # of a program in 32-bit mode
    "k": ["random", *of_any_lanes("random_branch")],
    # A key of `rbg` or `unsafe_rbg`.
    "g": ["random_of_lanes", "random_in_inner_loop_of_lanes", *of_any_lanes("random_branch_of_lanes")],
    "y": ["random_of_loop"],  # a key that the loop is given
    "m": ["module", "trained_module", *of_any_lanes("module_in_branch")],
    "b": ["append", "newest_of_buffer"],
    "h": ["push", "window"],
    "r": ["write", "read", *of_any_lanes("write_in_branch")],
    "a": ["wide"],
    "c": [  # choices by constants, and flags
        *("chosen_by_a_constant", "chosen_by_constants", "one_of_constants", "constant", "chosen_inner_loop"),
        *(
            "chosen_result",
            "scan_with_constants",
            "flag_of_scan",
            "flag_of_loop",
            "flags_of_rows",
            "checkpoint_of_scan",
        ),
    ],
    "t": ["turn_if", "set_flag", *of_any_lanes("branch_on_flag")],
    # Effects that a derivative keeps, that only a program without a derivative has, and in order, also without a batch.
    "e": [
        *("say", "say_in_inner_loop", "say_in_scan", "say_in_checkpoint", "say_in_custom_jvp", "say_in_custom_vjp"),
        *("say_in_backward_rule", "tell_in_backward_rule", *of_any_lanes("say_in_branch", "say_and_change_nothing")),
    ],
    "i": ["tell", "ask", "ask_in_checkpoint", *of_any_lanes("ask_in_branch")],
    "o": ["say_in_order"],
    "p": ["row_from_host", "branch_on_host"],  # rows in host memory
}
# Choices by constants three times: their outputs are literals, which went unseen for long.
CHOICES = ["chosen_by_a_constant", "chosen_inner_loop", "chosen_result", "scan_with_constants"]
ALWAYS += [*OF_FEATURES["c"], *CHOICES, *CHOICES]
OPERATIONS: dict[str, Operation] = {
    name: function_of(name) for group in (ALWAYS, *OF_FEATURES.values()) for name in group
}
WITH_BACKWARD_EFFECTS = {name for name in OPERATIONS if "backward" in name}
WITHOUT_FORWARD_MODE = {"custom_vjp", "squash", "say_in_custom_vjp", *WITH_BACKWARD_EFFECTS}
WITH_CHECKPOINTS = {name for name in OPERATIONS if "checkpoint" in name}
MIXES_LANES = {"rule_that_mixes_lanes", "inner_rule_that_mixes_lanes"}
BRANCHES = ("branch", "one_of_three", "say_and_change_nothing")
TAKES_BRANCHES = [name for name in OPERATIONS if any(branch in name for branch in BRANCHES)]
