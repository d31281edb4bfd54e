"""Rounds of microbatches that go through all chunks of the stages together."""

from typing import NamedTuple


class Place(NamedTuple):
    """Where a microbatch stands among all.

    Attributes:
        before: widths of the rounds before its own.
        number: its number in its round.
        width: of its round: as many operations as each chunk takes of a stage's time. At least P,
            since what leaves the last stage needs so long to have come from the first.
    """

    before: int
    number: int
    width: int

    def nth(self, chunk: int, num_chunks: int) -> int:
        """Operations of a stage before that of the microbatch in the chunk that comes `chunk`-th.

        Places that a round leaves empty count.
        """
        return self.before * num_chunks + chunk * self.width + self.number


def make_rounds(num_stages: int, num_microbatches: int) -> list[Place]:
    """The place of each microbatch, in rounds of P, or of a few more if M is no multiple of P.

    Args:
        num_stages: P.
        num_microbatches: M.
    """
    count = max(1, num_microbatches // num_stages)
    places: list[Place] = []
    before = 0
    for k in range(count):
        size = num_microbatches // count + (k < num_microbatches % count)
        width = max(size, num_stages)
        places += [Place(before, number, width) for number in range(size)]
        before += width
    return places
