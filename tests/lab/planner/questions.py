"""A question to the planner, to be changed by tests."""

from lab.costmodel.gpu import GPUS
from lab.costmodel.shape import SHAPES
from lab.planner.options import PlanOptions, parse_acceptance, parse_loads, parse_requests
from lab.planner.systems import parse_systems

H100, B8, B1 = GPUS["h100"], SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"]


def make(**changes):
    fields = {
        "gpu": H100,
        "target": B8,
        "draft": B1,
        "acceptance": parse_acceptance("0.7"),
        "loads": parse_loads("8", 0),
        "requests": parse_requests("100,20"),
        "systems": parse_systems("price"),
    }
    return PlanOptions(**(fields | changes))
