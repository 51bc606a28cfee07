"""How good are the plans? The planner on the inputs that other planners published, in their formats and objectives."""
