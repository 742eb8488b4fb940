"""Policies on modeled cost tables: recorded acceptance, the real scheduler and policy, a table's time."""
