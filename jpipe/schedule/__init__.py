"""Schedules as data: build, check, simulate and draw pipeline schedules. NumPy only."""

from jpipe.schedule.builders import (
    forward_only_schedule,
    gpipe_schedule,
    one_f_one_b_overlap_schedule,
    one_f_one_b_schedule,
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
    "make_schedule",
    "one_f_one_b_overlap_schedule",
    "one_f_one_b_schedule",
    "save_figure",
    "simulate_schedule",
]
