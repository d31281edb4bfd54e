"""Reads the text of a compiled XLA program, so that tests can ask what is in it.

A program is a set of computations, each a list of instructions; `while`, `conditional`, `fusion`
and `call` name the computations that they run.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_BITS = {"pred": 8, "bf16": 16}
COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: unique in the program.
        opcode: what it does, such as `copy`; of an asynchronous pair, `copy-start`, `copy-done`.
        arrays: (dtype, shape) of each array in its result.
        operands: names of the instructions that it reads.
        called: names of the computations that it runs.
        text: the line without its metadata.
        is_root: whether its result is that of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Size of the result."""
        return sum(_itemsize(dtype) * math.prod(shape) for dtype, shape in self.arrays)

    @property
    def is_collective(self) -> bool:
        """Whether devices take part in it together."""
        return self.opcode.removesuffix("-start") in COLLECTIVES

    @property
    def is_matmul(self) -> bool:
        """Whether it is a contraction, or the library call that XLA makes of one."""
        library = self.opcode == "custom-call" and re.search(r"matmul|gemm|dot", self.text, re.I)
        return self.opcode in ("dot", "convolution") or bool(library)

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The (source, target) devices of a collective-permute."""
        (text,) = re.findall(r"source_target_pairs=\{(\{.*?\})\}", self.text)
        return frozenset((int(s), int(t)) for s, t in re.findall(r"\{(\d+),(\d+)\}", text))


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        computations: the instructions of each computation, by its name.
        entry: name of the computation where the program begins.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def within(self, computation: str, *, enter_branches: bool = True) -> Iterator[Instruction]:
        """The instructions that run in a computation, and in those it runs.

        Args:
            computation: its name.
            enter_branches: whether to go into the branches of conditionals, too.
        """
        for instruction in self.computations[computation]:
            yield instruction
            if instruction.opcode == "conditional" and not enter_branches:
                continue
            for called in instruction.called:
                yield from self.within(called, enter_branches=enter_branches)

    def root(self, computation: str) -> Instruction:
        """The instruction whose result is that of the computation."""
        (found,) = (i for i in self.computations[computation] if i.is_root)
        return found

    @property
    def loop(self) -> Instruction:
        """The program's loop; it must have one, not in another."""
        (loop,) = self._outer_loops(self.entry)
        return loop

    @property
    def loop_body(self) -> str:
        """Name of the body of the program's loop."""
        (body,) = re.findall(r"body=%([\w.\-]+)", self.loop.text)
        return body

    @property
    def num_instructions(self) -> int:
        """Instructions in all computations."""
        return sum(map(len, self.computations.values()))

    def _outer_loops(self, computation: str) -> Iterator[Instruction]:
        for instruction in self.computations[computation]:
            if instruction.opcode == "while":
                yield instruction
                continue
            for called in instruction.called:
                yield from self._outer_loops(called)


def parse(text: str) -> Program:
    """Parse what `compiled.as_text()` returns."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found["name"], found["rest"], bool(found[1])))
    assert entry is not None, "no ENTRY computation"
    program = Program(computations, entry)
    for instruction in program.within(entry):  # fails if a called computation was not understood
        assert instruction.opcode
    return program


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    text = re.sub(r"/\*.*?\*/", "", rest)
    text = re.sub(r', metadata=\{(?:[^{}"]|"(?:\\.|[^"\\])*")*\}', "", text)
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    opcode, _, _ = text.partition("(")
    close = _closing(text, len(opcode))
    called = [c for group in _CALLED.findall(text) for c in re.findall(r"%([\w.\-]+)", group)]
    return Instruction(
        name=name,
        opcode=opcode,
        arrays=tuple(
            (dtype, tuple(int(d) for d in dims.split(",") if d))
            for dtype, dims in _ARRAY.findall(shape)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", text[len(opcode) : close])),
        called=tuple(called),
        text=text,
        is_root=is_root,
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for k in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[k], 0)
        if depth == 0:
            return k
    raise ValueError(f"unbalanced: {text[start:]}")


def _itemsize(dtype: str) -> int:
    return _BITS.get(dtype, int(re.sub(r"\D", "", dtype) or 0)) // 8
