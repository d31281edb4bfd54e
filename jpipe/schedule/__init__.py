"""Schedules as data: build, check, simulate and draw pipeline schedules. NumPy only."""

from jpipe.schedule.builders import (
    forward_only_schedule,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_overlap_schedule,
    one_f_one_b_schedule,
    zero_bubble_overlap_schedule,
    zero_bubble_schedule,
    zero_bubble_v_schedule,
)
from jpipe.schedule.cells import (
    read_schedule,
    schedule_from_cells,
    schedule_to_cells,
    write_schedule,
)
from jpipe.schedule.check import check_schedule
from jpipe.schedule.draw import draw_text, save_figure
from jpipe.schedule.registry import SCHEDULES, make_schedule
from jpipe.schedule.simulate import CostModel, Simulation, simulate_schedule
from jpipe.schedule.slots import Slots, assign_slots
from jpipe.schedule.table import Op, Route, Schedule

__all__ = [
    "SCHEDULES",
    "CostModel",
    "Op",
    "Route",
    "Schedule",
    "Simulation",
    "Slots",
    "assign_slots",
    "check_schedule",
    "draw_text",
    "forward_only_schedule",
    "gpipe_schedule",
    "interleaved_schedule",
    "make_schedule",
    "one_f_one_b_overlap_schedule",
    "one_f_one_b_schedule",
    "read_schedule",
    "save_figure",
    "schedule_from_cells",
    "schedule_to_cells",
    "simulate_schedule",
    "write_schedule",
    "zero_bubble_overlap_schedule",
    "zero_bubble_schedule",
    "zero_bubble_v_schedule",
]
