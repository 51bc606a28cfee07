"""The states on whose chains stages are searched: all downsets while they are few, else those of several linear orders.

few downsets:   one graph, every cut of the model is a state     (`full`: a search over it can be exact)
more:           a graph for each of `linear_orders`, whose states are prefixes and what fusion needs beside them
"""

from __future__ import annotations

from collections.abc import Iterator

from tvmhet.solve.orders import linear_orders
from tvmhet.solve.pack import StateGraph, predecessors, state_graph
from tvmhet.solve.problem import Problem

FULL_STATES = 1500  # every downset is a state up to here
_LINEAR_STATES = 6000  # and beyond it, states of one linear order


def all_graphs(problem: Problem, full_states: int = FULL_STATES) -> Iterator[StateGraph]:
    """Make the graph of all downsets if there are up to `full_states`, or else those of several linear orders.

    Graphs without states, on which no sequence of kernels runs the whole model, are left out.
    """
    if problem.num_nodes < full_states:  # there is at least one downset per node
        full = state_graph(problem, range(problem.num_nodes), full=True, max_states=full_states)
        if full.num_states:
            yield full
            return
    for order in linear_orders(predecessors(problem)):
        graph = state_graph(problem, order, full=False, max_states=_LINEAR_STATES)
        if graph.num_states:
            yield graph
