"""One file for each schedule."""

from jpipe.schedule.builders.forward_only import forward_only_schedule
from jpipe.schedule.builders.gpipe import gpipe_schedule
from jpipe.schedule.builders.interleaved import interleaved_schedule
from jpipe.schedule.builders.one_f_one_b import one_f_one_b_schedule
from jpipe.schedule.builders.one_f_one_b_overlap import one_f_one_b_overlap_schedule
from jpipe.schedule.builders.zero_bubble import zero_bubble_schedule
from jpipe.schedule.builders.zero_bubble_overlap import zero_bubble_overlap_schedule
from jpipe.schedule.builders.zero_bubble_v import zero_bubble_v_schedule

__all__ = [
    "forward_only_schedule",
    "gpipe_schedule",
    "interleaved_schedule",
    "one_f_one_b_overlap_schedule",
    "one_f_one_b_schedule",
    "zero_bubble_overlap_schedule",
    "zero_bubble_schedule",
    "zero_bubble_v_schedule",
]
