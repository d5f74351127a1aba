"""Random programs, of which each can be run: what loopax or JAX refuses is not drawn, with the reason."""

from dataclasses import replace
from random import Random

from tests.fuzz.catalogue import (
    ALWAYS,
    MIXES_LANES,
    OF_FEATURES,
    TAKES_BRANCHES,
    WITH_BACKWARD_EFFECTS,
    WITHOUT_FORWARD_MODE,
)
from tests.fuzz.loops import MOST_INNER_STEPS
from tests.fuzz.program import KINDS, LANES, POLICIES, ROWS, Program
from tests.fuzz.transformations import AROUND, BATCHES, DERIVATIVES, FORWARD, REVERSE, TRANSFORMATIONS

TRUNCATED = ("last two", "windows of two")
STORES_EVERY_STEP = ("bounded", "residuals")
FREE_INNER_LOOPS = ("inner_loop", "inner_loop_of_any_length", "inner_while", "inner_solves", "say_in_inner_loop")
OTHER_INNER_LOOPS = (
    *("batch", "slope", "inner_rows", "loop_in_loop", "chosen_inner_loop", "flag_of_loop"),
    *("flags_of_rows", "turn_if"),
    *("inner_stages", "doubles_in_inner_loop", "checkpoint_of_scan"),
    *("random_in_inner_loop_of_lanes", "inner_rule_that_mixes_lanes", *TAKES_BRANCHES),  # a branch is a loop
)
# Results of an inner loop, which is then dead code.
DROPS_RESULTS = ("overwrite", "window", "eigenvalues", "constant")
LETTERS = "zfkmbhrtgyeeeccccciopd"  # of features; of some, more often
NOT_OF_LAX = "bhry"  # what is no argument of its loops, or loopax's own
LARGE = 4  # operations: more derivatives of more of them take long to compile


def program(number: int) -> Program:
    """The program of this number."""
    random = Random(number)
    rewritten = random.random() < 0.1
    features = _features(random, rewritten)
    body = _body(random, features)
    loop = random.choice(["scan", "fori", "while"])
    steps = random.choice([None, None, None, *range(ROWS + 1)])
    if rewritten and loop == "scan" and (not steps or "d" in features):  # rows behind the last one are zeros
        steps = ROWS
    stop = loop != "fori" and not (rewritten and loop == "scan") and random.random() < 0.5
    counted = loop != "while" and steps is not None
    has_lax = counted and not stop and not rewritten  # a reverse mode
    # `rewrite_loops` would cut inner loops, too; loopax refuses another derivative of mutable arrays and of free lanes.
    can_be_cut = not rewritten and "r" not in features
    # JAX has no batch of the derivative of a `custom_vjp`; the Python loop also walks back through steps that are cut.
    has_last = can_be_cut and not WITHOUT_FORWARD_MODE & {*body}
    refused = {"lax": not has_lax, "last two": not has_last, "windows of two": not can_be_cut}
    kind = random.choice([kind for kind in KINDS if not refused.get(kind)])
    bounds = [MOST_INNER_STEPS + 1] if rewritten else [ROWS + 1, 2, 0]  # `rewrite_loops` bounds inner loops, too
    max_steps = None if kind == "lax" else random.choice([None, None, *bounds])
    if max_steps is None and kind in STORES_EVERY_STEP and (rewritten or loop != "scan"):
        max_steps = MOST_INNER_STEPS + 1  # these kinds need a static bound
    # There is no `jax.checkpoint` of a function that writes to a mutable array or a buffer, or has effects in order.
    policy = random.choice([*POLICIES]) if random.random() < 0.16 and not {*features} & {*"bro"} else ""
    bounded = loop == "scan" or counted or max_steps is not None
    return Program(
        loop,
        body,
        features,
        steps,
        # In reverse, lanes with fewer steps begin later, so they meet other steps of other lanes.
        reverse=loop == "scan" and not _mixes_lanes(body, features) and random.random() < 0.5,
        unroll=random.randint(1, 3) if has_lax and max_steps is None else 1,
        stop=stop,
        max_steps=max_steps,
        kind=kind,
        lanes=_lanes(random, body, features, can_be_free=not (rewritten or policy or kind in TRUNCATED)),
        policy=policy,
        rewritten=rewritten,
        transformations=_transformations(random, body, features, policy, bounded),
        seed=random.randrange(1000),
    )


def watched(number: int) -> Program:
    """The program of this number, whose steps are looked at, and of which one breaks in most of them."""
    plain, random = program(number), Random(number + 2**31)
    # `rewrite_loops` raises where a step breaks, and what lanes see of one that has broken may break them.
    no_break = plain.rewritten or MIXES_LANES & {*plain.body}
    planted = random.choice(["nan", "nan", "inf", "watched"])
    return replace(plain, finite="watched" if no_break else planted)


def _features(random: Random, rewritten: bool) -> str:
    letters = [letter for letter in LETTERS if not (rewritten and letter in NOT_OF_LAX)]
    found = {random.choice(letters) for _ in range(random.choice([0, 1, 1, 2]))}
    if "o" in found:  # JAX compiles no ordered effect beside an array in host memory
        found -= {"p"}
    return "".join(sorted(found | {"a"} if random.random() < 0.5 else found))


def _body(random: Random, features: str) -> tuple[str, ...]:
    """Small or large, with an operation for each feature and more of them."""
    size = random.choice([random.randint(1, 3), random.randint(3, 9)])
    special = [OF_FEATURES[letter] for letter in features]
    groups = [
        random.choice(special) if special and random.random() < 0.2 else ALWAYS for _ in range(size - len(special))
    ]
    body = [random.choice(group) for group in (*special, *groups)]
    random.shuffle(body)
    return tuple(body)


def _lanes(random: Random, body: tuple[str, ...], features: str, can_be_free: bool) -> str:
    """Free lanes are for a body with one inner loop, whose results are used.

    What a lane draws from some keys depends on the other lanes, which have to take the same step.
    """
    one = sum(name in FREE_INNER_LOOPS for name in body) == 1 and not {*body} & {*OTHER_INNER_LOOPS, *DROPS_RESULTS}
    if _mixes_lanes(body, features):
        return random.choice(["lockstep", "compact", "auto"])
    return random.choice(["free"] * 4 * (can_be_free and one) + [name for name in LANES if name != "free"])


def _mixes_lanes(body: tuple[str, ...], features: str) -> bool:
    return bool({*features} & {*"gy"} or MIXES_LANES & {*body})


def _transformations(
    random: Random, body: tuple[str, ...], features: str, policy: str, bounded: bool
) -> tuple[str, ...]:
    """Most programs with branches have lanes, for which they are."""
    refused = _refused({*body}, features)
    names = [name for name in (*TRANSFORMATIONS, *AROUND) if name not in refused]
    has_second = policy != "offload" and not WITH_BACKWARD_EFFECTS & {*body}  # JAX itself has none of these
    derivatives = 2 if has_second and len(body) <= LARGE else 1
    # JAX has no second reverse mode of mutable arrays, also without a loop. For `squash`, which is not linear, loopax
    # needs the cotangents of all steps then.
    reverse_twice = "r" not in features and ("squash" not in body or bounded)
    # What JAX draws from some keys in a batch of batches depends on the order of axes; a loop has its lanes in front.
    most_batches = 1 if {*features} & {*"gy"} else 3

    def is_taken(found: tuple[str, ...]) -> bool:
        """Three derivatives in a row take seconds to compile, for JAX's own loops as well: two of them and a batch."""
        in_reverse = sum(name in REVERSE for name in found)
        if sum(name in BATCHES for name in found) > most_batches:
            return False
        return sum(name in DERIVATIVES for name in found) <= derivatives and (reverse_twice or in_reverse < 2)

    most = 2 if len(body) > LARGE else 3
    found = _sequence(random, names, most)
    while not is_taken(found):
        found = _sequence(random, names, most)
    batches = [name for name in names if name in BATCHES]
    takes_branches = {*body, *found} & {*TAKES_BRANCHES, *AROUND}
    if not batches or not takes_branches or BATCHES & {*found} or random.random() < 1 / 3:
        return found
    place = random.randint(0, len(found))
    return (*found[:place], random.choice(batches), *found[place:])


def _refused(body: set[str], features: str) -> set[str]:
    """Transformations that this body does not have."""
    reasons = [
        (WITHOUT_FORWARD_MODE & body, FORWARD),
        # In 32-bit mode, JAX makes no numbers of 64 bits for the other branch.
        ("d" in features, {*AROUND}),
        # Lanes that do not take a branch are seen by those that do; the unrolled program has ones in their place.
        (MIXES_LANES & body, {*AROUND}),
        # Nobody is asked for a lane that has finished, so what others see of it is not its own.
        (MIXES_LANES & body and "i" in features, BATCHES),
        # What a lane writes to a buffer and reads again, loopax shows to no other lane.
        (MIXES_LANES & body and {"append", "push"} & body, BATCHES),
        # JAX chooses nothing by lane in host memory.
        ("branch_on_host" in body, BATCHES),
        # loopax refuses these effects in a derivative.
        ("i" in features, DERIVATIVES),
        # There is no order of effects of lanes, or of those in `jax.checkpoint`.
        ("o" in features, DERIVATIVES | BATCHES | {"checkpoint"}),
        # JAX does not map a derivative whose tangents alone are mapped, where there is a mutable array. Nor does it
        # differentiate a `jax.checkpoint` with one in reverse mode, if something else differs in its derivative.
        ("r" in features, {"jacfwd", "checkpoint"}),
        # Where a value is the same in all lanes, what its backward rule gets is a sum over lanes or of one lane, as JAX
        # maps the value or not: an effect tells them apart, and so does a rule that is not linear.
        ({"squash", *WITH_BACKWARD_EFFECTS} & body, {"vmap of n"}),
    ]
    return {name for applies, names in reasons if applies for name in names}


def _sequence(random: Random, names: list[str], most: int) -> tuple[str, ...]:
    """Derivatives and batches more often than the others."""
    groups = [[name for name in names if name in group] for group in (DERIVATIVES, DERIVATIVES, BATCHES)]
    length = 0 if random.random() < 0.08 else random.randint(1, most)
    return tuple(random.choice(random.choice([*groups, names]) or names) for _ in range(length))
