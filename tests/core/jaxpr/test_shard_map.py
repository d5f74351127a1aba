"""`shard_map`, collectives and shardings on eight virtual devices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import loopax as lx
from tests.support.problem import KINDS, WITH_LAX, name_of
from tests.support.reference import assert_close

STARTS = jnp.linspace(-0.9, 1.1, 16)
SPEC = PartitionSpec("d")


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("d",), axis_types=(axis_type,))


def sharded(f, check_vma):
    return jax.shard_map(f, mesh=mesh(), in_specs=SPEC, out_specs=SPEC, check_vma=check_vma)


def energy(kind):
    """Elementwise, so that shards do not need each other."""
    return lambda h: (lx.scan(lambda h, _: (jnp.sin(h) * 1.1, h), h, None, length=5, kind=kind)[0] ** 2).sum()


def energy_expected(h):
    return (lax.scan(lambda h, _: (jnp.sin(h) * 1.1, h), h, None, length=5)[0] ** 2).sum()


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_forward(kind, check_vma):
    f = sharded(lambda h: energy(kind)(h)[None], check_vma)
    assert_close(jax.jit(f)(STARTS).sum(), energy_expected(STARTS))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradients_inside_and_outside(kind, check_vma):
    wanted = jax.grad(energy_expected)(STARTS)
    inside = sharded(jax.grad(energy(kind)), check_vma)
    outside = jax.grad(lambda h: sharded(lambda h: energy(kind)(h)[None], check_vma)(h).sum())
    assert_close(jax.jit(inside)(STARTS), wanted)
    assert_close(jax.jit(outside)(STARTS), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_hessian_inside(kind):
    f = sharded(jax.hessian(energy(kind)), True)
    blocks = jax.jit(f)(STARTS).reshape(8, 2, 2)
    wanted = jax.hessian(energy_expected)(STARTS)
    assert_close(blocks, jnp.stack([wanted[i : i + 2, i : i + 2] for i in range(0, 16, 2)]))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_collective_in_the_body(kind, check_vma):
    def shard(times):
        def step(h):
            return jnp.sin(h) + 0.1 * lax.psum(h.sum(), "d")

        return lambda h: times(step, h)

    loop = lambda step, h: lx.fori_loop(0, 4, lambda i, h: step(h), h, kind=kind)
    plain = lambda step, h: lax.fori_loop(0, 4, lambda i, h: step(h), h)
    actual = jax.jit(jax.grad(lambda h: (sharded(shard(loop), check_vma)(h) ** 2).sum()))(STARTS)
    assert_close(actual, jax.grad(lambda h: (sharded(shard(plain), check_vma)(h) ** 2).sum())(STARTS))


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_counts_that_differ_between_devices(kind):
    counts = jnp.arange(8, dtype=jnp.int32)

    def shard(h, n):
        return lx.fori_loop(0, n[0], lambda i, h: jnp.sin(h) * 1.1, h, max_steps=9, kind=kind)

    f = jax.shard_map(shard, mesh=mesh(), in_specs=(SPEC, SPEC), out_specs=SPEC)
    wanted = jnp.stack([lax.fori_loop(0, int(i) // 2, lambda i, h: jnp.sin(h) * 1.1, STARTS[i]) for i in range(16)])
    assert_close(jax.jit(f)(STARTS, counts), wanted)


def of_count(kind, bound, **options):
    return lambda h, n: lx.fori_loop(0, n, lambda i, h: jnp.sin(h) * 1.1, h, max_steps=bound, kind=kind, **options)


def of_condition(kind, bound, **options):
    def loop(h, n):
        body = lambda c: (jnp.sin(c[0]) * 1.1, c[1] + 1)
        return lx.while_loop(lambda c: c[1] < n, body, (h, 0), max_steps=bound, kind=kind, **options)[0]

    return loop


def of_rows(kind, bound, **options):
    def loop(h, n):
        step = lambda h, x: (jnp.sin(h) * x, None)
        return lx.scan(step, h, jnp.full(bound, 1.1), length=n, reverse=True, kind=kind, **options)[0]

    return loop


PER_DEVICE = {
    "grad": lambda f: lambda h, n: jax.grad(f)(h[0], n[0])[None],
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "grad of vmap": lambda f: jax.grad(lambda h, n: jax.vmap(f)(h, n).sum()),
}


@pytest.mark.parametrize("transform", PER_DEVICE)
@pytest.mark.parametrize(
    ("loop", "kind", "bound"),
    [
        *((loop, kind, 9) for loop in (of_count, of_condition, of_rows) for kind in KINDS),
        *((loop, kind, None) for loop in (of_count, of_condition) for kind in (lx.Checkpointed(), lx.Checkpointed(3))),
    ],
)
def test_gradients_of_counts_that_differ_between_devices(loop, kind, bound, transform):
    """Rows of the replay vary, and JAX's check of what varies is on."""
    one_each = transform == "grad"
    starts = STARTS[::2] if one_each else STARTS
    counts = jnp.arange(len(starts), dtype=jnp.int32) % 9
    f = sharded(PER_DEVICE[transform](loop(kind, bound)), True)
    assert_close(jax.jit(f)(starts, counts), _slopes(starts, counts))


def _slopes(starts, counts):
    slope = jax.grad(lambda h, n: lax.fori_loop(0, n, lambda i, h: jnp.sin(h) * 1.1, h))
    return jnp.stack([slope(h, int(n)) for h, n in zip(starts, counts, strict=True)])


@pytest.mark.parametrize("kind", [lx.Checkpointed(), lx.Checkpointed(3), lx.Residuals()], ids=name_of)
@pytest.mark.parametrize("loop", [of_count, of_condition])
def test_hessians_of_counts_that_differ_between_devices(loop, kind):
    counts = jnp.arange(16, dtype=jnp.int32) % 9
    f = sharded(jax.vmap(jax.hessian(loop(kind, 9))), True)
    hessian = jax.hessian(lambda h, n: lax.fori_loop(0, n, lambda i, h: jnp.sin(h) * 1.1, h))
    wanted = [hessian(h, int(n)) for h, n in zip(STARTS, counts, strict=True)]
    assert_close(jax.jit(f)(STARTS, counts), jnp.stack(wanted))


@pytest.mark.parametrize("loop", [of_count, of_condition])
def test_compact_lanes_of_counts_that_differ_between_devices(loop):
    counts = jnp.arange(16, dtype=jnp.int32) % 9
    lanes = jax.vmap(jax.grad(loop(lx.Checkpointed(), 9, lanes=lx.Compact(min_lanes=1))))
    assert_close(jax.jit(sharded(lanes, True))(STARTS, counts), _slopes(STARTS, counts))


def test_start_that_is_the_same_on_all_devices():
    """The body mixes it with data that varies: the start is marked as varying, as a weak type is promoted."""
    f = sharded(lambda x: lx.fori_loop(0, 3, lambda i, total: total + x.sum(), jnp.zeros(()))[None], True)
    assert_close(jax.jit(f)(STARTS), 3 * STARTS.reshape(8, 2).sum(1))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_shardings_are_kept(kind, axis_type):
    devices = mesh(axis_type)
    with jax.set_mesh(devices):
        h = jax.device_put(STARTS, NamedSharding(devices, SPEC))
        gradient = jax.jit(jax.grad(energy(kind)))(h)
    assert gradient.sharding.is_equivalent_to(NamedSharding(devices, SPEC), 1)
    assert_close(jax.device_get(gradient), jax.device_get(jax.grad(energy_expected)(STARTS)))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_collective_over_a_vmapped_axis(kind):
    step = lambda h: jnp.sin(h) + lax.pmean(h, "i")
    f = lambda h: lx.fori_loop(0, 3, lambda i, h: step(h), h, kind=kind)
    expected = lambda h: lax.scan(lambda h, _: (step(h), None), h, None, length=3)[0]
    assert_close(jax.vmap(f, axis_name="i")(STARTS), jax.vmap(expected, axis_name="i")(STARTS))
    gradient = jax.jit(jax.vmap(jax.grad(f), axis_name="i"))
    assert_close(gradient(STARTS), jax.vmap(jax.grad(expected), axis_name="i")(STARTS))


def test_spmd_axis_name():
    f = lambda h, n: lx.fori_loop(0, n, lambda i, h: jnp.sin(h) * 1.1, h, max_steps=6)
    counts = jnp.arange(16) % 5
    lanes = jax.jit(jax.vmap(jax.grad(f), spmd_axis_name="d"))
    assert_close(lanes(STARTS, counts), jax.vmap(jax.grad(f))(STARTS, counts))


VARYING = {
    "stop": lambda x: lx.scan(lambda c, _: (c * 1.2, c), x, length=6, stop=lambda c, y: c.sum() > 1.5)[0],
    "inner check": lambda x: lx.fori_loop(
        0, 2, lambda _, c: lx.while_loop(lambda c: c.sum() < 1.5, lambda c: c * 1.2, c, max_steps=30), x
    ),
    "lanes": jax.vmap(lambda x: lx.while_loop(lambda c: c < 1.5, lambda c: c * 1.2, x, max_steps=60)),
    "lanes that stop": jax.vmap(
        lambda x: lx.scan(lambda c, _: (c * 1.2, c), x, length=6, stop=lambda c, y: c > 1.5)[1].sum()
    ),
}


@pytest.mark.parametrize("program", VARYING)
def test_conditions_that_vary_between_devices(program):
    """Flags and conditions start as varying where what they come to depend on does."""
    f, starts = VARYING[program], jnp.abs(STARTS) + 0.1
    gradient = jax.grad(lambda x: f(x).sum())
    shards = starts.reshape(8, 2)
    assert_close(jax.jit(sharded(f, True))(starts), jnp.concatenate([f(shard) for shard in shards]))
    assert_close(jax.jit(sharded(gradient, True))(starts), jnp.concatenate([gradient(shard) for shard in shards]))
