"""`sluice autoscale`: what a scaling policy would have done with given traffic, and at what cost."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli import coldstart

if TYPE_CHECKING:
    from autoscaling.fit import Fitted
    from autoscaling.report.summary import Summary
    from autoscaling.simulator.run import Outcome, Setup
    from autoscaling.spec import PolicySpec
    from autoscaling.traces.trace import Trace

_PROFILE = "gpu-example"
_COMPARED = ("burst", "diurnal", "flash_crowd", "ramp")
_POSITIVE = r"(?=[0-9.]*[1-9])[0-9]+(?:\.[0-9]+)?"
_VARIED = re.compile(rf"(?P<name>.*?)(?::(?P<scale>{_POSITIVE}))?(?:@(?P<speed>{_POSITIVE}))?", re.DOTALL)


def add(commands: Any) -> None:
    """Declares `sluice autoscale`."""
    p = commands.add_parser("autoscale", help="simulate, compare and tune scaling policies")
    verbs = p.add_subparsers(dest="verb", metavar="VERB", required=True)

    one = verbs.add_parser("simulate", help="one trace against one or more policies, side by side")
    one.add_argument("--trace", required=True, metavar="FILE|NAME", help="a recorded file, or a generator's name")
    one.add_argument(
        "--policy", action="append", metavar="NAME|YAML", help="repeat to compare; default: slo and ongoing"
    )
    one.add_argument("--out", type=Path, metavar="HTML", help="write a page there, and the curves as PNG next to it")
    one.add_argument(
        "--equal-replica-hours",
        action="store_true",
        help="set the target of each policy `ongoing` so that it costs what the first policy does",
    )
    _common(one)
    one.set_defaults(run=_checked(_simulate))

    many = verbs.add_parser("compare", help="a policy on several traces against `ongoing` at equal cost or SLO")
    many.add_argument(
        "--trace",
        action="append",
        metavar="FILE|NAME[:X][@Y]",
        help=f"with X times the requests, played Y times as fast; default: {', '.join(_COMPARED)}",
    )
    many.add_argument("--policy", default="slo", metavar="NAME|YAML", help="default: %(default)s")
    many.add_argument(
        "--baseline", default="ongoing", metavar="NAME|YAML", help="an `ongoing` one (its other settings)"
    )
    many.add_argument("--markdown", action="store_true", help="the table as Markdown")
    _common(many)
    many.set_defaults(run=_checked(_compare))

    tune = verbs.add_parser("tune", help="search a policy's settings; prints the Pareto set")
    tune.add_argument("--trace", required=True, metavar="FILE|NAME")
    tune.add_argument("--policy", default="slo", metavar="NAME|YAML", help="where to begin; default: %(default)s")
    tune.add_argument("--trials", type=int, default=40, help="default: %(default)s")
    tune.add_argument("--target", type=float, default=0.99, help="attainment wanted; default: %(default)s")
    tune.add_argument("--out", type=Path, metavar="YAML", help="write the cheapest that reaches the target there")
    _common(tune)
    tune.set_defaults(run=_checked(_tune))

    fit = verbs.add_parser("fit", help="a service model from engine_bench's JSON or from a request log")
    fit.add_argument("file", type=Path)
    fit.add_argument(
        "--beside", type=Path, metavar="FILE", help="the same while another replica of its host is busy: contention"
    )
    fit.add_argument("--model", metavar="NAME", help="of a request log with several models: the one to fit")
    fit.add_argument("--base", default=_PROFILE, metavar="NAME|JSON", help="what the file does not tell is from there")
    fit.add_argument("--out", type=Path, metavar="JSON", help="write the profile there; else it is printed")
    fit.set_defaults(run=_checked(_fit))

    coldstart.add(verbs)


def _common(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    p.add_argument("--ttft-slo", type=float, default=1.0, metavar="S", help="seconds to the first token (%(default)s)")
    p.add_argument("--profile", default=_PROFILE, metavar="NAME|JSON", help="of a replica; default: %(default)s")
    p.add_argument("--startup", type=float, metavar="S", help="seconds until a new replica serves (default: profile's)")
    p.add_argument("--min", type=int, default=1, metavar="N", help="replicas at least (default: %(default)s)")
    p.add_argument("--max", type=int, default=32, metavar="N", help="replicas at most (default: %(default)s)")
    p.add_argument("--initial", type=int, metavar="N", help="replicas at the start (default: for the first 5 minutes)")
    p.add_argument("--router", default="least_loaded", help="least_loaded, power_of_two or round_robin")
    p.add_argument("--interval", type=float, default=1.0, metavar="S", help="between decisions (default: %(default)s)")
    p.add_argument("--rate", type=float, default=50.0, help="of generated traces, requests/s on the mean (%(default)s)")
    p.add_argument("--hours", type=float, default=3.0, help="of generated traces (default: %(default)s)")
    p.add_argument("--scale-rate", type=float, default=1.0, metavar="X", help="so many times the requests")
    p.add_argument("--speedup", type=float, default=1.0, metavar="X", help="play the trace so many times as fast")
    p.add_argument("--seed", type=int, default=0)


def _checked(run: Any) -> Any:
    def checked(args: argparse.Namespace) -> int:
        try:
            return int(run(args))
        except (ValueError, OSError, ImportError) as error:  # PolicyError and TraceError among them
            print(f"sluice autoscale {args.verb}: {error}", file=sys.stderr)
            return 2

    return checked


def _simulate(args: argparse.Namespace) -> int:
    from autoscaling.comparison import Baseline
    from autoscaling.progress import ProgressBar
    from autoscaling.report.summary import HEADS, cells, summarise
    from autoscaling.report.tables import text_table
    from autoscaling.settings import PolicyError
    from autoscaling.simulator.run import simulate

    trace = _trace(args, args.trace)
    specs = [_spec(args, name) for name in args.policy or ("slo", "ongoing")]
    labels = [spec.label for spec in specs]
    if len(set(labels)) < len(labels):
        raise PolicyError(f"policy: each needs a name of its own, got {', '.join(labels)}")
    if args.out is not None:
        _writable(args.out)
    setup = _setup(args, trace)
    bar = ProgressBar()
    outcomes: list[tuple[str, Outcome]] = []
    summaries: list[Summary] = []
    for spec in specs:
        label = spec.label
        if args.equal_replica_hours and summaries and spec.policy == "ongoing":
            bar.show(f"{label} at {summaries[0].replica_hours:.2f} replica-hours", 0.0)
            found = Baseline(spec, trace, setup, args.ttft_slo).at_hours(summaries[0].replica_hours)
            label, outcome = found.spec.label, found.outcome
        else:
            progress = lambda share, label=label: bar.show(label, share)  # noqa: E731
            outcome = simulate(trace, spec.controller(), setup, progress)
        outcomes.append((label, outcome))
        summaries.append(summarise(label, outcome, args.ttft_slo))
        bar.done(f"{label}: {len(trace)} requests")
    facts = _facts(args, trace, setup)
    if args.json:
        print(json.dumps({**_about(args, trace, setup), "policies": [_plain(s) for s in summaries]}, indent=2))
    else:
        print(*facts, "", text_table(HEADS, [cells(s) for s in summaries]), sep="\n")
    if args.out is not None:
        from autoscaling.report.figure import as_png
        from autoscaling.report.plots import draw
        from autoscaling.report.simulation import simulation_page

        figure = draw(outcomes, args.ttft_slo)
        args.out.write_text(simulation_page(trace.name, facts, summaries, outcomes, figure), encoding="utf-8")
        args.out.with_suffix(".png").write_bytes(as_png(figure))
        print(f"wrote {args.out} and {args.out.with_suffix('.png')}", file=sys.stderr)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from autoscaling.comparison import Comparison, compare
    from autoscaling.progress import ProgressBar
    from autoscaling.report.tables import markdown_table, text_table

    bar = ProgressBar()
    spec, baseline = _spec(args, args.policy), _spec(args, args.baseline)
    results: list[Comparison] = []
    for name in args.trace or _COMPARED:
        trace = _varied(args, name)
        bar.show(trace.name, len(results) / len(args.trace or _COMPARED))
        results.append(compare(spec, baseline, trace, _setup(args, trace), args.ttft_slo))
        bar.done(trace.name)
    if args.json:
        print(json.dumps([r.as_dict() for r in results], indent=2))
    else:
        write = markdown_table if args.markdown else text_table
        print(write(Comparison.HEADS, [r.cells() for r in results]))
    return 0


def _tune(args: argparse.Namespace) -> int:
    from autoscaling.progress import ProgressBar
    from autoscaling.report.summary import HEADS, cells
    from autoscaling.report.tables import text_table
    from autoscaling.tuning import as_yaml, tune

    if args.out is not None:
        _writable(args.out)
    trace, spec, bar = _trace(args, args.trace), _spec(args, args.policy), ProgressBar()
    setup = _setup(args, trace)
    best = tune(
        spec,
        trace,
        setup,
        args.ttft_slo,
        args.trials,
        lambda n, done: bar.show(f"{done[-1].summary.slo_attainment:.2%}", n / args.trials),
    )
    bar.done(f"{args.trials} trials, {len(best)} that no other beats")
    good = [trial for trial in best if trial.summary.slo_attainment >= args.target]
    if args.json:
        found = [_plain(t.summary) | {"settings": as_yaml(t.spec)} for t in best]
        print(json.dumps({**_about(args, trace, setup), "pareto": found}, indent=2))
    else:
        print(*_facts(args, trace, setup), "", text_table(HEADS, [cells(t.summary) for t in best]), sep="\n")
        if good:
            print(f"\nThe cheapest that meets the SLO for {args.target:.2%}:\n\n{as_yaml(good[0].spec)}", end="")
        else:
            print(f"\nNone meets the SLO for {args.target:.2%}.")
    if args.out is not None and good:
        args.out.write_text(as_yaml(good[0].spec), encoding="utf-8")
    return 0 if good else 1


def _fit(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from autoscaling.fit import fit_contention, fit_file
    from autoscaling.service_model import ServiceModel

    found = fit_file(args.file, ServiceModel.load(args.base), args.model)
    print(f"{found.num} measurements; {_errors(found)}", file=sys.stderr)
    if args.beside is not None:
        found = fit_contention(args.beside, found.model, args.model)
        longer = f"{1 + found.model.contention:.2f} times as long beside a busy replica"
        print(f"{longer}: {found.num} measurements; {_errors(found)}", file=sys.stderr)
    if args.out is not None:
        found.model.save(args.out)
    else:
        print(json.dumps(asdict(found.model), indent=2))
    return 0


def _errors(found: Fitted) -> str:
    return f"half of them within {found.error:.1%}, 95 % within {found.worst:.1%}"


def _varied(args: argparse.Namespace, given: str) -> Trace:
    """A trace of `compare`, named after what was made of it."""
    from dataclasses import replace

    found = _VARIED.fullmatch(given)
    assert found is not None  # whatever has no such end is a name
    name, scale, speed = found["name"], float(found["scale"] or 1), float(found["speed"] or 1)
    trace = _trace(args, name, scale, speed)
    return replace(trace, name=trace.name + given[len(name) :])


def _trace(args: argparse.Namespace, name: str, scale: float = 1.0, speed: float = 1.0) -> Trace:
    from autoscaling.service_model import ServiceModel
    from autoscaling.settings import PolicyError
    from autoscaling.traces.generators import GENERATORS, generate
    from autoscaling.traces.trace import fit_limits, load_trace, scale_rate, speed_up

    for option in ("scale_rate", "speedup", "ttft_slo", "interval"):
        if not 0 < getattr(args, option) < float("inf"):
            raise PolicyError(f"--{option.replace('_', '-')}: must be above 0, got {getattr(args, option):g}")
    if name in GENERATORS or not Path(name).exists():
        trace = generate(name, args.rate, args.hours * 3600, args.seed)
    else:
        trace = load_trace(Path(name))
    scale, speed = scale * args.scale_rate, speed * args.speedup
    if scale != 1.0:
        trace = scale_rate(trace, scale, args.seed)
    if speed != 1.0:
        trace = speed_up(trace, speed)
    return fit_limits(trace, ServiceModel.load(args.profile).kv_tokens)


def _spec(args: argparse.Namespace, name: str) -> PolicySpec:
    """The SLO of the command line is that of the policy, unless its file says otherwise."""
    from autoscaling.spec import PolicySpec

    spec = PolicySpec.load(name, {"min_replicas": args.min, "max_replicas": args.max})
    if name == "slo":
        spec = spec.with_params(spec.label, ttft_slo_s=args.ttft_slo)
    return spec


def _setup(args: argparse.Namespace, trace: Trace) -> Setup:
    from dataclasses import replace

    from autoscaling.service_model import ServiceModel
    from autoscaling.settings import PolicyError
    from autoscaling.simulator.cluster import ROUTERS
    from autoscaling.simulator.run import Setup, fair_start

    if args.router not in ROUTERS:
        raise PolicyError(f"--router: must be one of {', '.join(ROUTERS)}, got {args.router!r}")
    model = ServiceModel.load(args.profile)
    if args.startup is not None:
        model = replace(model, startup_s=args.startup)
    initial = fair_start(trace, model) if args.initial is None else args.initial
    initial = max(args.min, min(args.max, initial))
    return Setup(model, args.router, initial, args.interval, min(0.5, args.interval), args.seed)


def _facts(args: argparse.Namespace, trace: Trace, setup: Setup) -> Sequence[str]:
    m = setup.model
    return (
        f"traffic: {trace.name}: {'; '.join(trace.notes)}; {len(trace)} requests in {trace.duration_s / 3600:.2f} h, "
        f"{trace.rate:.3g}/s, {trace.prompt_tokens.mean():.0f} prompt and {trace.output_tokens.mean():.0f} output "
        "tokens",
        f"replica: profile {args.profile} ({m.about}), serves {m.startup_s:g} s after the decision",
        f"pool: {args.min} to {args.max} replicas, {setup.initial_replicas} at the start; {setup.router}; "
        f"a decision every {setup.interval_s:g} s; SLO: first token within {args.ttft_slo:g} s; seed {setup.seed}",
    )


def _about(args: argparse.Namespace, trace: Trace, setup: Setup) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "notes": list(trace.notes),
        "requests": len(trace),
        "duration_s": trace.duration_s,
        "ttft_slo_s": args.ttft_slo,
        "profile": args.profile,
        "startup_s": setup.model.startup_s,
        "initial_replicas": setup.initial_replicas,
        "seed": setup.seed,
    }


def _plain(summary: Summary) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(summary)


def _writable(path: Path) -> None:
    """Before minutes of work, not after. Raises OSError."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
