"""Placement as a problem over numbers: search, bounds, an independent checker and a simulator."""

from tvmhet.solve.check import check
from tvmhet.solve.check_training import check_training
from tvmhet.solve.collectives import AllReduce
from tvmhet.solve.iteration import (
    IterationProblem,
    IterationSolution,
    IterationStage,
    MicroBatch,
    StagePlacing,
    stashes_of_edges,
)
from tvmhet.solve.iteration_search import solve_iteration
from tvmhet.solve.iteration_simulated import solve_simulated
from tvmhet.solve.objective import IN_SECONDS, Objective
from tvmhet.solve.problem import DeviceGroup, Edge, Kernel, Link, Problem, Weight, Wire
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.search import solve
from tvmhet.solve.simulate import Event, Timeline, simulate
from tvmhet.solve.simulate_training import TrainingEvent, TrainingTimeline, simulate_training
from tvmhet.solve.solution import Solution, SolvedStage, Status
from tvmhet.solve.splits import Split, with_splits

__all__ = [
    "IN_SECONDS",
    "AllReduce",
    "DeviceGroup",
    "Edge",
    "Event",
    "IterationProblem",
    "IterationSolution",
    "IterationStage",
    "Kernel",
    "Link",
    "MicroBatch",
    "Objective",
    "Problem",
    "Schedule",
    "Solution",
    "SolvedStage",
    "Split",
    "StagePlacing",
    "Status",
    "Timeline",
    "TrainingEvent",
    "TrainingTimeline",
    "Weight",
    "Wire",
    "check",
    "check_training",
    "simulate",
    "simulate_training",
    "solve",
    "solve_iteration",
    "solve_simulated",
    "stashes_of_edges",
    "with_splits",
]
