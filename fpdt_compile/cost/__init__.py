"""Symbolic memory formulas and hardware facts the planner uses; never touches FX."""
