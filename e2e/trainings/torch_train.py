"""A training as people write them: PyTorch alone, no hooks of the platform's.

It trains a small network on four processes or however many there are, replicated (`--parallel ddp`) or sharded
(`--parallel fsdp`), saves itself with torch.distributed.checkpoint, and goes on from the newest checkpoint that is
whole. Each rank says which samples it takes, so that a test can tell whether one came twice.

With HOLD=START:STEP it stands still after that step, until GATE is opened; a START is an attempt or a restart in place.
"""

import argparse
import ipaddress
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser()
arguments.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--save-every", type=int, default=5)
options = arguments.parse_args()

BATCH = 4  # samples of a rank in a step
folder = pathlib.Path(os.environ["AVIFLOW_CHECKPOINT_DIR"])


def say(line: str) -> None:
    """Prints a line in one piece: processes of a launcher share its output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def wired() -> None:
    """What every launcher must have arranged."""
    nodes, node = int(os.environ["NNODES"]), int(os.environ["NODE_RANK"])
    local, each = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    assert dist.get_world_size() == nodes * each == int(os.environ["WORLD_SIZE"]), os.environ
    assert dist.get_rank() == node * each + local, (dist.get_rank(), node, each, local)
    # An address means the same on every node; `localhost` does not.
    ipaddress.ip_address(os.environ["MASTER_ADDR"])
    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.tensor([float(rank)])
    dist.all_reduce(one)
    assert one.item() == size * (size - 1) / 2, one
    order = [None] * size
    dist.all_gather_object(order, (rank, node, local))
    assert order == [(r, r // each, r % each) for r in range(size)], order


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample of a number: always the same."""
    x = torch.randn(8, generator=torch.Generator().manual_seed(number))
    return x, x.sum().tanh().reshape(1)


def newest() -> pathlib.Path | None:
    """The newest checkpoint that is whole: its metadata is written last."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, key=lambda path: int(path.name.removeprefix("step-")), default=None)


dist.init_process_group("gloo")
wired()
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(int(os.environ.get("AVIFLOW_SEED", "1")))
model: nn.Module = Network()
if options.parallel == "ddp":
    model = DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

step, first_loss = 0, float("nan")
found = newest()
if found is not None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(0), "first": torch.tensor(0.0)}
    dcp.load(state, checkpoint_id=found)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step, first_loss = int(state["step"]), float(state["first"])
say(f"rank {rank} of {size} goes on after step {step}")

while step < options.steps:
    begin = step * size * BATCH + rank * BATCH
    numbers = list(range(begin, begin + BATCH))
    inputs, wanted = (torch.stack(part) for part in zip(*map(sample, numbers)))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    optimizer.step()
    step += 1
    say(f"took in step {step}: {numbers}")
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean = mean.item() / size
    if step == 1:
        first_loss = mean
    if rank == 0:
        say(f"step {step}/{options.steps} | loss {mean:.4f}")
    if step % options.save_every == 0:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(step), "first": torch.tensor(first_loss)}
        dcp.save(state, checkpoint_id=folder / f"step-{step}")
    start = int(os.environ["AVIFLOW_ATTEMPT"]) + int(os.environ["AVIFLOW_EPOCH"]) - 1
    if os.environ.get("HOLD") == f"{start}:{step}" and rank == 0:
        say(f"held after step {step}")
        with open(os.environ["GATE"]) as gate:
            gate.read()

assert mean < first_loss / 2, f"it has not learned: {first_loss} at first, {mean} at last"
if rank == 0:
    say(f"learned: loss {first_loss:.4f} at first, {mean:.4f} at last")
dist.barrier()
dist.destroy_process_group()
