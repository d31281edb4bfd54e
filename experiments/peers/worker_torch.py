"""Worker: torch.distributed.pipelining over gloo, and torch's own loop on one device."""

import pathlib
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from model_torch import make_stage, next_token_loss
from problem import STAGES, load_problem
from protocol import serve
from ranks_torch import SCHEDULES, run_rank, squared_norm
from resident import resident_growth
from torch import multiprocessing

LOOPS = {"loop-1-thread": 1, "loop-2-threads": 2}


class Loop:
    """Plain gradient accumulation in this process."""

    def __init__(
        self, num_threads: int, folder: pathlib.Path, problem: str, num_microbatches: int
    ) -> None:
        size, arrays, inputs, targets = load_problem(folder, problem, num_microbatches)
        params = {
            part: {name: torch.from_numpy(a) for name, a in leaves.items()}
            for part, leaves in arrays.items()
        }
        self._num_threads = num_threads
        self._model = make_stage(params, size.heads, 0, 1)
        self._batches = list(zip(torch.from_numpy(inputs), torch.from_numpy(targets), strict=True))

    def _step(self) -> float:
        torch.set_num_threads(self._num_threads)
        self._model.zero_grad()
        total = torch.zeros(())
        for inputs, targets in self._batches:
            loss = next_token_loss(self._model(inputs), targets) / len(self._batches)
            loss.backward()
            total += loss.detach()
        return float(total)

    def check(self) -> dict[str, float]:
        """Loss and norm of the gradient."""
        return {"loss": self._step(), "grad_norm": squared_norm([self._model]) ** 0.5}

    def time(self) -> dict[str, float]:
        """Run once."""
        cpu, wall = time.process_time(), time.perf_counter()
        self._step()
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}

    def memory(self) -> dict[str, int]:
        """Growth of the process."""
        growth = resident_growth(self._step)
        return {"process": growth, "resident": growth}

    def close(self) -> None:
        """The garbage collector does it."""


class Ranks:
    """The processes of the pipelines."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def ask(self, op: str, key: Any) -> list[Any]:
        """Answers of all processes.

        If one of them fails, the others wait for it for ever: all are ended, and begin anew with
        the next question.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((op, key))
        waiting, answers = list(self._pipes), {}
        while waiting:
            for pipe in wait(waiting):
                answers[pipe] = answer = pipe.recv()
                waiting.remove(pipe)
                if isinstance(answer, Exception):
                    self._stop()
                    raise answer
        return [answers[pipe] for pipe in self._pipes]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = pathlib.Path(tempfile.mkdtemp()) / "meeting"
        for rank in range(STAGES):
            here, there = context.Pipe()
            arguments = rank, meeting, self._folder, there
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes, self._pipes = [], []


class Pipeline:
    """One schedule, run by all processes."""

    def __init__(self, ranks: Ranks, *key: Any) -> None:
        self._ranks, self._key = ranks, key

    def check(self) -> dict[str, float]:
        """Loss and norm of the gradient."""
        losses, squares = zip(*self._ranks.ask("check", self._key), strict=True)
        return {"loss": sum(losses), "grad_norm": sum(squares) ** 0.5}

    def time(self) -> dict[str, float]:
        """CPU time of all processes together, wall time of the last to be done."""
        cpu, wall = zip(*self._ranks.ask("time", self._key), strict=True)
        return {"cpu": sum(cpu), "wall": max(wall)}

    def memory(self) -> dict[str, int]:
        """Growth of the largest process, and of all together."""
        growths = self._ranks.ask("memory", self._key)
        return {"process": max(growths), "resident": sum(growths)}

    def close(self) -> None:
        """Free the stages."""
        self._ranks.ask("close", self._key)


def main() -> None:
    """Serve."""
    folder = pathlib.Path(sys.argv[1])
    ranks = Ranks(folder)

    def make(contender: str, problem: str, num_microbatches: int) -> Any:
        kind = contender.removeprefix("torch/")
        if kind in LOOPS:
            return Loop(LOOPS[kind], folder, problem, num_microbatches)
        return Pipeline(ranks, kind, problem, num_microbatches)

    contenders = [f"torch/{kind}" for kind in (*LOOPS, *SCHEDULES)]
    serve(contenders, {"torch": torch.__version__}, make)


if __name__ == "__main__":
    main()
