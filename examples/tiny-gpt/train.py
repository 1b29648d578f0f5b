"""Trains a small GPT on bytes, data parallel over all processes of the job.

Outside the platform `python train.py` runs it as one process. On it, each process finds its
rank in the environment. The loss series depends on the seed, the settings and the number
of processes, and on nothing else: not on when the run was stopped and resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, TextIO

try:
    import aviflow
except ImportError:
    hooks = Path(__file__).resolve().parents[2] / "python" / "aviflow" / "src"
    if not hooks.is_dir():
        raise SystemExit(
            "the package aviflow is missing, which the platform provides; "
            "elsewhere run `pip install -e python/aviflow` in Aviflow's repository"
        ) from None
    sys.path.insert(0, str(hooks))
    import aviflow

PROCESSES = int(os.environ.get("JAX_NUM_PROCESSES") or 1)
RANK = int(os.environ.get("JAX_PROCESS_ID") or 0)

# Processes of one machine share its cores, and virtual nodes are one machine; threads beyond
# the cores only get in each other's way. XLA reads both variables when it is loaded.
os.environ.setdefault("NPROC", str(max(1, (os.cpu_count() or 1) // PROCESSES)))
if os.environ["NPROC"] == "1":
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.flatten_util import ravel_pytree  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

import checkpoint  # noqa: E402
import data  # noqa: E402
import model  # noqa: E402
import prepare  # noqa: E402

BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-9
WEIGHT_DECAY, CLIP = 0.1, 1.0
VALIDATION_WINDOWS = 512


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, help="corpus file, or the folder it is in")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop-after", type=int, help="stop gracefully after this step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="windows a step, all processes")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=30, help="steps")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints")
    parser.add_argument("--checkpoints", type=Path, default=aviflow.checkpoint_dir())
    parser.add_argument("--out", type=Path, default=aviflow.output_dir())
    options = parser.parse_args()
    options.corpus = options.corpus or aviflow.data_dir("corpus")
    options.checkpoints = options.checkpoints or Path("runs/checkpoints")
    options.out = options.out or Path("runs/out")
    if options.batch % PROCESSES:
        parser.error(f"--batch {options.batch} is no multiple of the {PROCESSES} processes")
    return options


def join() -> Mesh:
    """Meets the other processes; returns the line of all their devices."""
    if PROCESSES > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], PROCESSES, RANK)
    return Mesh(np.array(jax.devices()), ("data",))


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step <= options.warmup:
        return options.learning_rate * step / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_step(config: model.ModelConfig, unravel: Any, decay: np.ndarray, mesh: Mesh) -> Any:
    """One step of AdamW over flat vectors.

    Gradient, loss and the wish to stop are summed over the processes as one vector, by one
    collective: so all ranks learn of a stop at the same step, at no further cost.
    """
    world = mesh.size

    def step(weights, first, second, number, rate, windows, stop):
        value, gradient = jax.value_and_grad(
            lambda flat: model.loss(unravel(flat), windows, config)
        )(weights)
        both = jnp.concatenate([gradient, jnp.stack([value, stop[0]])])
        both = jax.lax.psum(both, "data")
        gradient, value, stop = both[:-2] / world, both[-2] / world, both[-1]
        norm = jnp.sqrt(jnp.sum(gradient * gradient))
        gradient *= jnp.minimum(1.0, CLIP / (norm + 1e-6))
        first = BETA1 * first + (1 - BETA1) * gradient
        second = BETA2 * second + (1 - BETA2) * gradient * gradient
        update = (first / (1 - BETA1**number)) / (jnp.sqrt(second / (1 - BETA2**number)) + EPSILON)
        weights = weights - rate * (update + WEIGHT_DECAY * decay * weights)
        return weights, first, second, value, norm, stop

    everywhere, split = P(), P("data")
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(everywhere,) * 5 + (split, split),
            out_specs=(everywhere,) * 6,
            check_vma=False,
        ),
        donate_argnums=(0, 1, 2),
    )


def validate(weights: Any, config: Any, unravel: Any, held_out: np.ndarray) -> float:
    """Mean loss in nats a byte over windows of the held-out part, each process its share."""
    count = VALIDATION_WINDOWS // PROCESSES * PROCESSES
    starts = data.validation_starts(held_out, config.context, count)
    flat = np.asarray(weights.addressable_data(0))
    evaluate = jax.jit(lambda flat, windows: model.loss(unravel(flat), windows, config))
    mine = starts[RANK::PROCESSES]
    losses = [
        float(evaluate(flat, data.take(held_out, mine[i : i + 8], config.context)))
        * len(mine[i : i + 8])
        for i in range(0, len(mine), 8)
    ]
    total = np.array([sum(losses), len(mine)])
    totals = multihost_utils.process_allgather(total).reshape(-1, 2).sum(axis=0)
    return float(totals[0] / totals[1])


def resume(folder: Path, corpus: data.Corpus, settings: dict[str, Any]) -> checkpoint.State | None:
    """The state to go on from: the one that rank 0 finds, since another rank may see the
    folder earlier or later. Ends the run where a rank has another corpus than rank 0."""
    newest = checkpoint.newest(folder) if RANK == 0 else None
    step = checkpoint.step_of(newest) if newest else 0
    mine = np.frombuffer(bytes.fromhex(corpus.sha256[:16]), np.int32)
    theirs = multihost_utils.broadcast_one_to_all(np.array([*mine, step], np.int32))
    if not np.array_equal(theirs[:2], mine):
        raise SystemExit(
            f"rank {RANK} has another corpus than rank 0, {corpus.sha256[:16]}: give all ranks "
            "one with --corpus, or the same Python to make it from"
        )
    step = int(theirs[2])
    return checkpoint.load(folder, step, settings) if step else None


def open_losses(path: Path, step: int) -> TextIO:
    """The file of all losses, cut after `step`: later ones are of work that is repeated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # Steps are counted from 1, one line each; so a last line that was cut goes too.
    with aviflow.atomic_write(path, "w") as file:
        file.writelines(lines[:step])
    return path.open("a", buffering=1)  # by lines, so that a killed run has told its last step


def main() -> int:
    options = arguments()
    mesh = join()
    aviflow.install_sigterm_handler()
    print(f"rank {RANK} of {PROCESSES} on {socket.gethostname()}: {mesh.local_devices}", flush=True)

    corpus = data.load(options.corpus or prepare.prepare(aviflow.cache_dir()))
    seed = aviflow.seed() or 0
    config = model.ModelConfig(layers=options.layers)
    sampler = data.Sampler(corpus.train, config.context, options.batch, seed)
    share = options.batch // PROCESSES
    mine = range(RANK * share, (RANK + 1) * share)
    settings = {
        **vars(config),
        "batch": options.batch,
        "corpus": corpus.sha256,
        "learning rate": options.learning_rate,
        "seed": seed,
        "steps": options.steps,
        "warmup": options.warmup,
    }

    initial = model.init(config, seed)
    flat, unravel = ravel_pytree(initial)
    weights = np.asarray(flat)
    # Weight decay is for matrices alone; scales of norms have no reason to be small.
    matrices = jax.tree.map(lambda w: np.full(w.shape, w.ndim > 1, np.float32), initial)
    train_step = make_step(config, unravel, np.asarray(ravel_pytree(matrices)[0]), mesh)

    if RANK == 0:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        aviflow.remove_partials(options.checkpoints)
        print(
            f"{weights.size:,} parameters; corpus {corpus.sha256[:16]}, {len(corpus.text):,} bytes"
        )
        aviflow.log_data("corpus", sha256=corpus.sha256, size=len(corpus.text))
        aviflow.log_facts(
            framework=f"jax {jax.__version__}",
            device=mesh.local_devices[0].platform,
            parameters=weights.size,
            processes=PROCESSES,
        )

    state = resume(options.checkpoints, corpus, settings) or checkpoint.State(
        0, weights, np.zeros_like(weights), np.zeros_like(weights)
    )
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    arrays = [
        jax.make_array_from_process_local_data(replicated, array)
        for array in (state.weights, state.first_moment, state.second_moment)
    ]
    if RANK == 0:
        print(f"step {state.step + 1} of {options.steps} comes next", flush=True)
        losses = open_losses(options.out / "losses.jsonl", state.step)

    def save(step: int) -> None:
        if RANK == 0:
            os.fsync(losses.fileno())  # a checkpoint promises the losses up to its step
            whole = (np.asarray(array.addressable_data(0)) for array in arrays)
            saved = checkpoint.State(step, *whole)
            checkpoint.save(options.checkpoints, saved, settings, options.keep)

    for step in range(state.step + 1, options.steps + 1):
        began = time.perf_counter()
        rate = learning_rate(step, options)
        wish = np.array([aviflow.should_stop() or step == options.stop_after], np.float32)
        *arrays, loss, norm, stop = train_step(
            *arrays,
            float(step),
            rate,
            jax.make_array_from_process_local_data(split, sampler.windows_of(step, mine)),
            jax.make_array_from_process_local_data(split, wish),
        )
        loss, stop = float(loss), bool(stop)
        speed = options.batch * config.context / (time.perf_counter() - began)
        if RANK == 0:
            losses.write(json.dumps({"step": step, "loss_hex": loss.hex()}) + "\n")
            if step % 10 == 0 or step == state.step + 1:
                progress = f"step {step}/{options.steps} loss {loss:.4f} lr {rate:.2e}"
                print(f"{progress} grad {float(norm):.2f} tokens/s {speed:.0f}", flush=True)
        aviflow.log(
            step,
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            tokens_per_second=speed,
            total_steps=options.steps,
            tokens=step * options.batch * config.context,
        )
        if step % options.checkpoint_every == 0 or step == options.steps or stop:
            save(step)
        if stop and step < options.steps:
            if RANK == 0:
                print(f"stopped after step {step}, saved: {aviflow.stop_reason() or 'asked to'}")
            return aviflow.REQUEUE

    validation = validate(arrays[0], config, unravel, corpus.held_out)
    if RANK == 0:
        fitted = data.bigram_loss(corpus.train, corpus.held_out)
        entropy = data.bigram_entropy(corpus.text)
        aviflow.log_summary(
            {
                "validation loss": validation,
                "byte-bigram entropy": entropy,
                "byte-bigram validation loss": fitted,
            }
        )
        print(f"byte-bigram model of the training part on the held-out part: {fitted:.4f}")
        print(f"validation loss: {validation:.4f}")
        print(f"byte-bigram entropy: {entropy:.4f}", flush=True)
    return 0


def fail_at_once(error: BaseException) -> NoReturn:
    """Ends a rank that failed. A normal exit would first wait in JAX's shutdown for the
    other ranks, and keep the platform from seeing the failure for minutes."""
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    else:
        traceback.print_exception(error)
    aviflow.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException as failure:
        if PROCESSES == 1:
            raise
        fail_at_once(failure)
    sys.exit(code)
