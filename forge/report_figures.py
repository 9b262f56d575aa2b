"""The pictures of a report: which metrics are drawn together, and what each picture shows in plain words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from forge.charts import Mark, Series, histogram, line_chart, stacked_bars
from forge.formats import number
from forge.report_data import Points, RunRecord, is_finite


def figure(
    title: str,
    svg: str,
    meaning: str,
    legend: Sequence[Series] = (),
    *,
    marks: Sequence[Mark] = (),
    wide: bool = False,
) -> str:
    """A picture with its title, its key and what it shows in plain words; "" without a picture."""
    if not svg:
        return ""
    keys = "".join(
        f'<span class="key"><i class="c{s.colour} {s.look}"></i>{escape(s.name)}</span>' for s in legend if s.points
    )
    keys = keys if len([s for s in legend if s.points]) > 1 else ""
    for mark in {mark.name: mark for mark in marks}.values():
        sign = f'<svg class="chart sign" viewBox="-7 -7 14 14" aria-hidden="true">{mark.path()}</svg>'
        keys += f'<span class="key">{sign}{escape(mark.name)}</span>'
    key = f'<div class="keys">{keys}</div>' if keys else ""
    return (
        f'<figure class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3>{key}{svg}'
        f"<figcaption>{escape(meaning)}</figcaption></figure>"
    )


def _lines(
    run: RunRecord, title: str, meaning: str, *keys: tuple[str, str, int, str], unit: str = "", **options: Any
) -> str:
    """A figure of metrics; each key is (metric, name, colour, look)."""
    series = [Series(name=name, points=run.points(key), colour=colour, look=look) for key, name, colour, look in keys]
    return figure(title, line_chart(series, label=f"{title}. {meaning}", unit=unit, **options), meaning, series)


def _reward(run: RunRecord) -> str:
    points = run.points("reward/mean")
    window = max(5, len(points) // 20)
    smooth = running_mean(points, window) if len(points) > 2 else []
    series = [
        Series(name="each step", points=points, colour=0, look="faint" if smooth else ""),
        Series(name=f"mean of {window} steps", points=smooth, colour=0),
        Series(name="held-out rows", points=run.points("eval/mean_reward"), colour=1, look="dots"),
    ]
    meaning = (
        f"Mean reward of all completions a step looked at. Single steps jump with the difficulty of their prompts; "
        f"the thick line, the mean of {window} steps, is the one to read. Up is better."
    )
    svg = line_chart(series, label=f"Reward. {meaning}", wide=True)
    return figure("Reward", svg, meaning, series, wide=True)


def _components(run: RunRecord) -> str:
    own = ("mean", "std", "group_std", "failed", "count")
    keys = sorted({key for row in run.rows for key in row if re.fullmatch(r"reward/(?!component/)[^/]+", key)})
    parts = [key for key in keys if key.removeprefix("reward/") not in own]
    parts += sorted({key for row in run.rows for key in row if re.fullmatch(r"reward/component/[^/]+", key)})
    if len(parts) < 2:
        return ""
    return _lines(
        run,
        "Reward by part",
        "What each part of the reward gives on its own, over the completions that have it.",
        *((key, key.rpartition("/")[2], at, "") for at, key in enumerate(parts[:6])),
    )


def _signal(run: RunRecord) -> str:
    reasons = sorted({key for row in run.rows for key in row if key.startswith("group/dropped_")})
    layers = [Series(name="trained", points=run.points("group/kept"), colour=2)]
    for at, key in enumerate(reasons):
        name = key.removeprefix("group/dropped_").replace("_", " ")
        points = run.points(key)
        if any(y for _, y in points):
            layers.append(Series(name=name, points=points, colour=(4, 1, 3, 5)[at % 4]))
    meaning = (
        "Groups of each step. Only a group whose completions were rewarded differently says which was better; "
        "one with equal rewards carries no gradient. When nearly all are equal, the prompts are too easy or too hard."
    )
    return figure("What the groups were good for", stacked_bars(layers, label=meaning), meaning, layers)


def _ages(run: RunRecord) -> str:
    counts: dict[int, float] = {}
    for row in run.rows:
        for key, value in row.items():
            if (found := re.fullmatch(r"age/(-?\d+)", key)) and is_finite(value) and value:
                counts[int(found[1])] = counts.get(int(found[1]), 0.0) + value
    bound = run.summary.get("max_age_bound")
    mark = (float(bound), f"bound {number(bound)}") if is_finite(bound) and bound < 64 else None
    meaning = (
        "How many optimizer steps old the oldest weights were that sampled any token of a trained group (0: the "
        "weights it trained). No bar may lie to the right of the dashed line, the bound the run promises."
    )
    return figure("Age of the data", histogram(counts, label=meaning, mark=mark), meaning)


TRAINER_TIMES = (
    ("time/wait_batch_seconds", "waiting for rollouts", 4),
    ("time/train_seconds", "training", 0),
)
SYNC_TIMES = (
    ("time/publish_seconds", "publishing weights", 1),
    ("time/pull_seconds", "loading weights", 5),
)


def _timeline(run: RunRecord) -> str:
    """Stacks what a step is made of; what went on beside it (its seconds do not fit into the step) is a line."""
    whole = dict(run.points("time/step_seconds"))
    layers = [Series(name=name, points=run.points(key), colour=colour) for key, name, colour in TRAINER_TIMES]
    sync = [Series(name=name, points=run.points(key), colour=colour) for key, name, colour in SYNC_TIMES]
    generate = run.points("time/generate_seconds")
    beside = [Series(name="generating (beside it)", points=generate, colour=2, look="dashed")]
    known = _totals([*layers, *sync])
    if sum(known[x] > 1.02 * y for x, y in whole.items()) > 0.2 * len(whole):
        seconds = sorted(_totals(sync).items())
        beside.append(Series(name="weight sync (beside it)", points=seconds, colour=1, look="dashed"))
        known = _totals(layers)
    else:
        layers += sync
    rest = [(x, max(0.0, y - known[x])) for x, y in whole.items()]
    if any(y > 0.01 * whole[x] for x, y in rest):
        layers.append(Series(name="everything else", points=rest, colour=3))
    svg = stacked_bars(layers, lines=beside, label="Seconds of each step by what the trainer did", unit=" s", wide=True)
    meaning = (
        "Seconds of each step from the trainer's side. Grey is time it stood idle because rollouts were not ready. "
        "Dashed lines are work that goes on beside the trainer and costs no time of its own."
    )
    return figure("Where the time of a step goes", svg, meaning, [*layers, *beside], wide=True)


def _learning_rate(run: RunRecord) -> str:
    """Drawn only when it changes; a constant is in the configuration."""
    if len({y for _, y in run.points("trainer/lr")}) < 2:
        return ""
    key = ("trainer/lr", "learning rate", 4, "")
    return _lines(run, "Learning rate", "The rate each step used: warm-up, then the schedule.", key, zero=True)


def _totals(series: Sequence[Series]) -> Counter[float]:
    """Sum over the series at each step."""
    totals: Counter[float] = Counter()
    for one in series:
        totals.update(dict(one.points))
    return totals


def sections(run: RunRecord) -> Iterator[tuple[str, list[str]]]:
    """The figures under their headings; figures without data are empty strings."""
    yield "Does it learn?", [_reward(run), _components(run), _signal(run)]
    yield "Is the training healthy?", _health(run)
    yield "What do completions look like?", _completions(run)
    yield "Is the data fresh?", _freshness(run)
    yield "Where does the time go?", _time(run)


def _health(run: RunRecord) -> list[str]:
    """Curves that show trouble early."""
    return [
        _lines(
            run,
            "Policy loss",
            "The clipped objective that is minimised. It hovers around zero by design and is no measure of "
            "progress; what matters is that it does not drift or spike.",
            ("loss/policy", "policy loss", 0, ""),
        ),
        _lines(
            run,
            "Gradient norm",
            "Length of the gradient before clipping. Spikes mean unusual batches; steady growth means the "
            "learning rate is too high.",
            ("trainer/grad_norm", "gradient norm", 0, ""),
            zero=True,
        ),
        _lines(
            run,
            "Entropy",
            "How undecided the policy is per token. It falls while it learns; near zero it has stopped exploring.",
            ("policy/entropy", "entropy", 3, ""),
            zero=True,
            unit=" nats",
        ),
        _lines(
            run,
            "Divergence (KL)",
            "How far policies are apart, in nats per token: the trained one from the one that sampled (should stay "
            "near zero), and from the initial one (grows as it learns).",
            ("logprob_gap/kl_sampler_trainer", "from the sampler", 1, ""),
            ("loss/kl_reference", "from the initial policy", 0, ""),
            zero=True,
        ),
        _learning_rate(run),
    ]


def _completions(run: RunRecord) -> list[str]:
    """How long completions are."""
    return [
        _lines(
            run,
            "Completion length",
            "Tokens per completion, the mean and the longest of each step.",
            ("completion/tokens_mean", "mean", 0, ""),
            ("completion/tokens_max", "longest", 4, "thin"),
            zero=True,
        ),
        _lines(
            run,
            "Cut off at the length limit",
            "Share of completions that hit the limit before they ended. A rising share often means rambling.",
            ("completion/truncated_share", "share cut off", 1, ""),
            zero=True,
        ),
    ]


def _freshness(run: RunRecord) -> list[str]:
    """How far the sampling policy was from the trained one."""
    return [
        _ages(run),
        _lines(
            run,
            "Effective sample share",
            "How much of the batch still counts after re-weighting data from older weights: 1 is all of it, and "
            "the lower it gets the noisier the gradient. Beside it the share of tokens beyond the clip range.",
            ("ratio/effective_sample_share", "effective sample share", 2, ""),
            ("ratio/outside_clip", "outside the clip range", 1, ""),
            zero=True,
            top=1.0,
        ),
        _lines(
            run,
            "Importance ratio",
            "Mean of new over old probability of the trained tokens. It stays close to 1.",
            ("ratio/mean", "mean ratio", 0, ""),
        ),
        _lines(
            run,
            "Log-prob gap between trainer and sampler",
            "For the same tokens, how far the trainer's log-probs are from the sampler's. The floor is numerical "
            "(two engines); a jump means the sampler runs other weights than it says.",
            ("logprob_gap/mean", "mean", 0, ""),
            ("logprob_gap/max", "largest token", 4, "thin"),
            zero=True,
        ),
    ]


def _time(run: RunRecord) -> list[str]:
    """What each step waited for."""
    return [
        _timeline(run),
        _lines(
            run,
            "Rollout speed",
            "Tokens sampled per second, all generators together.",
            ("rollout/tokens_per_second", "tokens per second", 2, ""),
            zero=True,
        ),
        _lines(
            run,
            "Weight sync",
            "Seconds from publishing new weights until the generators sample with them.",
            ("weights/sync_seconds", "publish to live", 1, ""),
            zero=True,
            unit=" s",
        ),
    ]


def running_mean(points: Points, window: int) -> Points:
    """Mean of each point and the `window` - 1 before it.

    Example: running_mean([(1, 0), (2, 1), (3, 1)], 2) is [(1, 0), (2, 0.5), (3, 1)].
    """
    means: Points = []
    total = 0.0
    for at, (x, y) in enumerate(points):
        total += y - (points[at - window][1] if at >= window else 0.0)
        means.append((x, total / min(at + 1, window)))
    return means
