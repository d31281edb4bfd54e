"""The processes of a torch pipeline, one for each stage, and what they can be told to do."""

import pathlib
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from model_torch import make_stage, next_token_loss
from problem import STAGES, load_problem
from resident import resident_growth
from torch import distributed
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

CHUNKS = {
    ScheduleGPipe: 1,
    Schedule1F1B: 1,
    ScheduleInterleaved1F1B: 2,
    ScheduleInterleavedZeroBubble: 2,
}
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
}


class Rank:
    """This process's part in one pipeline."""

    def __init__(
        self, rank: int, folder: pathlib.Path, kind: str, problem: str, num_microbatches: int
    ) -> None:
        size, arrays, inputs, targets = load_problem(folder, problem, num_microbatches)
        params = {
            part: {name: torch.from_numpy(a) for name, a in leaves.items()}
            for part, leaves in arrays.items()
        }
        self.inputs = torch.from_numpy(inputs).flatten(0, 1)
        self.targets = torch.from_numpy(targets).flatten(0, 1)
        schedule = SCHEDULES[kind]
        count = STAGES * CHUNKS[schedule]
        mine = range(rank, count, STAGES)
        self.modules = [make_stage(params, size.heads, index, count) for index in mine]
        stages = [
            PipelineStage(module, index, count, torch.device("cpu"))
            for index, module in zip(mine, self.modules, strict=True)
        ]
        self.first, self.last = 0 in mine, count - 1 in mine
        one: Any = stages if CHUNKS[schedule] > 1 else stages[0]
        self.schedule = schedule(one, n_microbatches=num_microbatches, loss_fn=next_token_loss)

    def step(self) -> list[torch.Tensor]:
        """Fill the gradients; losses of the microbatches on the last stage."""
        for module in self.modules:
            module.zero_grad()
        losses: list[torch.Tensor] = []
        batch = (self.inputs,) if self.first else ()
        if self.last:
            self.schedule.step(*batch, target=self.targets, losses=losses)
        else:
            self.schedule.step(*batch)
        return losses

    def check(self) -> tuple[float, float]:
        """This rank's part of the loss, and of the squared norm of the gradient."""
        losses = self.step()
        loss = float(torch.stack(losses).detach().mean()) if losses else 0.0
        return loss, squared_norm(self.modules)

    def time(self) -> tuple[float, float]:
        """CPU and wall seconds of one step."""
        distributed.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        self.step()
        return time.process_time() - cpu, time.perf_counter() - wall

    def memory(self) -> int:
        """Growth of this process."""
        return resident_growth(self.step)


def squared_norm(modules: Any) -> float:
    """Of the gradients, in float64."""
    grads = [p.grad for module in modules for p in module.parameters()]
    return float(sum(torch.sum(g.double() ** 2) for g in grads))


def run_rank(rank: int, meeting: pathlib.Path, folder: pathlib.Path, pipe: Connection) -> None:
    """Obey until the pipe closes.

    Args:
        rank: number of this process.
        meeting: path of a file through which the processes find each other.
        folder: of the problems.
        pipe: takes `(op, key)`, where key is `(schedule, problem, num_microbatches)`, and answers.
    """
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=STAGES
    )
    pipelines: dict[tuple[str, str, int], Rank] = {}
    while True:
        try:
            op, key = pipe.recv()
        except EOFError:
            return
        try:
            if op == "close":
                pipelines.pop(key, None)
                pipe.send(None)
                continue
            if key not in pipelines:
                pipelines[key] = Rank(rank, folder, *key)
            pipe.send(getattr(pipelines[key], op)())
        except Exception as error:
            traceback.print_exc()
            pipe.send(error)
