"""Placement as a problem over numbers: search, bounds, an independent checker and a simulator."""

from tvmhet.solve.check import check
from tvmhet.solve.objective import Objective
from tvmhet.solve.problem import DeviceGroup, Edge, Kernel, Link, Problem, Weight
from tvmhet.solve.search import solve
from tvmhet.solve.simulate import Event, Timeline, simulate
from tvmhet.solve.solution import Solution, SolvedStage, Status

__all__ = [
    "DeviceGroup",
    "Edge",
    "Event",
    "Kernel",
    "Link",
    "Objective",
    "Problem",
    "Solution",
    "SolvedStage",
    "Status",
    "Timeline",
    "Weight",
    "check",
    "simulate",
    "solve",
]
