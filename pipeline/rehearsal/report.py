"""Write the figures of a rehearsal beside those of a plan."""

from collections.abc import Iterator

from g2rpo_core.estimate.machines import (
    ASSUMED_TFLOPS,
    DECODE_SLOWER,
    RESERVE_GIB,
    SCORE_SLOWER,
    Machines,
)
from g2rpo_core.estimate.plan import GIB, Plan
from pipeline.rehearsal.inputs import ITERATIONS
from pipeline.rehearsal.meter import Meter

# A phase of training that users name -> its measured phases, and those that a plan adds up
PHASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "load": (("load", "start"), ()),
    "rollout": (("rollout", "decode", "score", "monitor"), ("rollout", "decoding", "scoring")),
    "update": (("iteration", "update", "optimizer"), ("update", "optimizer")),
    "save": (("save",), ()),
}
# Than products in bfloat16; a plan counts measurements apart
SLOWER = {"decode": DECODE_SLOWER, "score": SCORE_SLOWER, "monitor": 0}
ROW = "{:<9}{:>12}{:>9}{:>14}{:>9}".format


def lines(title: str, machines: Machines, meters: dict[str, Meter], plan: Plan) -> Iterator[str]:
    """Yield the report; meters: of the stages, by name."""
    nodes = f" on {machines.nodes} nodes" if machines.nodes > 1 else ""
    verdict = "fits" if fits(machines, meters) else "DOES NOT FIT"
    yield f"{title}, {machines.gpus} GPUs of {machines.memory:g} GiB{nodes}: {verdict}"
    yield f"Without the {RESERVE_GIB:g} GiB in reserve; of an iteration:"
    yield ROW("", "GiB per GPU", "planned", "GB it sends", "planned")
    peaks = {stage: max(meter.peaks.values()) / GIB for stage, meter in meters.items()}
    costs, train = meters["train"].costs, meters["train"].peaks
    yield ROW("embed", f"{peaks['embed']:.2f}", "", "", "")
    for phase, (measured, planned) in PHASES.items():
        gib = max(train[each] for each in measured) / GIB
        expected = max((plan.phases_gib[each] for each in planned), default=0) - RESERVE_GIB
        sent = costs[phase, "sent"] / ITERATIONS / 1e9
        beside = (f"{expected:.2f}", f"{sent:.2f}", f"{plan.sent_gb.get(phase, 0):.2f}")
        yield ROW(phase, f"{gib:.2f}", *(beside if planned else ("", "", "")))
    yield ROW("evaluate", f"{peaks['evaluate']:.2f}", "", "", "")
    computed = sum(
        cost * SLOWER.get(phase, 1) / (ASSUMED_TFLOPS * 1e12)
        for (phase, kind), cost in costs.items()
        if kind == "flops"
    )
    sending = sum(costs[phase, "seconds"] for phase in ("rollout", "update", "optimizer"))
    yield (
        f"seconds per iteration at {ASSUMED_TFLOPS:.0f} TFLOP/s, with nothing overlapped: "
        f"{(computed + sending) / ITERATIONS:.1f}, planned {plan.seconds_per_iteration:.1f}"
    )


def fits(machines: Machines, meters: dict[str, Meter]) -> bool:
    most = max(peak for meter in meters.values() for peak in meter.peaks.values())
    return most / GIB + RESERVE_GIB <= machines.memory
