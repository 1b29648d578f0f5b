"""JAX on several processes, which find each other without an argument: `jax.distributed.initialize()` is all."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS, BATCH = 40, 8

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize()
rank, size = jax.process_index(), jax.process_count()
assert (rank, size) == (int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])), (rank, size)
assert size > 1 and jax.device_count() == size * jax.local_device_count(), jax.devices()

everyone = multihost_utils.process_allgather(np.array([rank]))
assert everyone.ravel().tolist() == list(range(size)), everyone

mesh = Mesh(np.array(jax.devices()), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
same = NamedSharding(mesh, PartitionSpec())


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
def summed(x):
    return jax.lax.psum(x.sum(), "data")


def shared(local: np.ndarray) -> jax.Array:
    return jax.make_array_from_process_local_data(split, local)


ranks = shared(np.full((jax.local_device_count(),), float(rank), np.float32))
total = float(summed(ranks))
assert total == jax.local_device_count() * size * (size - 1) / 2, total


def loss_of(weights, x, y):
    return jnp.mean((x @ weights - y) ** 2)


@jax.jit
def update(weights, x, y):
    loss, slope = jax.value_and_grad(loss_of)(weights, x, y)
    return weights - 0.1 * slope, loss


truth = np.arange(4, dtype=np.float32)
weights = jax.device_put(jnp.zeros(4), same)
losses = []
for step in range(1, STEPS + 1):
    x = np.random.default_rng((rank, step)).standard_normal((BATCH, 4), np.float32)
    weights, loss = update(weights, shared(x), shared(x @ truth))
    losses.append(float(loss))
    if rank == 0:
        print(f"step {step}/{STEPS} | loss {losses[-1]:.4f}", flush=True)
assert losses[-1] < losses[0] / 2, losses
if rank == 0:
    print(f"learned: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last, {size} processes", flush=True)
