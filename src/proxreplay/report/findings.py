"""What a study says, in plain words, and what to keep in mind before believing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxreplay.evaluation import PairedDifference
from proxreplay.experiments.results import StoredRun
from proxreplay.report.grouping import Group, Section, Study
from proxreplay.report.tables import FEW_SEEDS, Comparison, comparisons, paper_row_of, several_codes

MOST_REASONS = 20
COARSE_SHARE = 0.05  # evaluations further apart than this share of a task miss dips


@dataclass(frozen=True)
class Caution:
    """Something to keep in mind."""

    # serious if numbers are missing or wrong for it, note otherwise
    level: Literal["serious", "note"]
    text: str  # what, and the way out
    details: tuple[str, ...] = ()  # one line each, for who wants to know more

    def __str__(self) -> str:
        return " ".join([self.text, *self.details])


# The verdict -------------------------------------------------------------------------------------


def verdict(section: Section) -> list[str]:
    """A few sentences: each LPR method against its base, or else which method is ahead."""
    found = comparisons(section)
    if found:
        return [_compared(one, brief=len(found) > 2) for one in found]
    return [_leader(section)]


def _compared(one: Comparison, *, brief: bool) -> str:
    """Such as: LPR (ER) ends 5.8 points above ER (95 % interval +4.5 to +7.4) ..."""
    name, base, found = one.group.label, one.base.label, one.differences
    sentences = []
    if "acc" in found:
        ahead = f", ahead in {one.better['acc']} of {one.seeds} seeds" if one.seeds > 1 else ""
        sentences.append(
            f"{name} ends {_points(found['acc'])} {base}{_certainty(found['acc'], brief)}{ahead}."
        )
    rest = {"aaa": "averaged over the stream", "wc_acc": "at its worst"}
    parts = [
        f"{when} it is {_points(found[measure])} {base}{_certainty(found[measure], brief)}"
        for measure, when in rest.items()
        if measure in found
    ]
    if parts:
        text = "; ".join(parts)
        start = text[0].upper() + text[1:] if sentences else f"{name}: {text}"
        sentences.append(f"{start}.")
    if one.seeds == 1:
        sentences.append("This is one seed only.")
    return " ".join(sentences)


def _points(difference: PairedDifference) -> str:
    points = 100 * difference.mean
    if abs(points) < 0.05:
        return "level with"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def _certainty(difference: PairedDifference, brief: bool) -> str:
    if difference.seeds == 1:
        return ""
    few = difference.seeds < FEW_SEEDS  # too few for an interval: what each of them says
    low, high = (difference.least, difference.most) if few else (difference.low, difference.high)
    unclear = low <= 0 <= high
    if brief:  # the table has the intervals
        return " (not clear)" if unclear else ""
    kind = "seed by seed" if few else "95 % interval"
    return f" ({'not clear, ' if unclear else ''}{kind} {100 * low:+.1f} to {100 * high:+.1f})"


def _leader(section: Section) -> str:
    means = {
        group.label: sum(values.values()) / len(values)
        for group in section.groups
        if (values := group.values("acc") or group.values("aaa"))
    }
    if not means:
        return "No run is complete yet, so there is nothing to compare."
    best = max(means, key=lambda label: means[label])
    if len(means) == 1:
        return f"{best} ends at an accuracy of {means[best]:.4f}; there is nothing to compare with."
    return f"{best} is ahead with a final accuracy of {means[best]:.4f}."


# Warnings ----------------------------------------------------------------------------------------


def study_warnings(study: Study) -> list[Caution]:
    """What is wrong with runs, whichever section they belong to."""
    warnings = _left_out(study)
    unfinished = [run for run in study.runs if run.status == "incomplete"]
    if unfinished:
        warnings.append(
            Caution(
                "note",
                f"{_count(unfinished)} not finished: {_names(unfinished)}. The curves show what is "
                "there, the tables leave them out. Go on with: proxreplay resume FOLDER",
            )
        )
    done = [run for run in study.runs if run.status == "complete"]
    partly = [run for run in done if run.problem]
    if partly:
        text = f"The results of {_names(partly)} are there, but: {_line(partly[0].problem)}"
        warnings.append(Caution("note", text))
    results_only = [run for run in done if run.recorded is None]
    if results_only:
        text = f"Of {len(results_only)} of {len(study.runs)} runs only the results were kept: they "
        warnings.append(Caution("note", text + "are in the tables, but not in the curves."))
    return warnings


def _left_out(study: Study) -> list[Caution]:
    """One summary of the runs that no table counts, their reasons gathered."""
    reasons: dict[str, list[StoredRun]] = {}
    for run in study.runs:
        if run.status in ("broken", "failed"):
            reasons.setdefault(f"{run.status}: {_line(run.problem)}", []).append(run)
    if not reasons:
        return []
    runs = [run for found in reasons.values() for run in found]
    details = [f"{reason} ({_names(found)})" for reason, found in reasons.items()]
    if len(details) > MOST_REASONS:
        more = len(details) - MOST_REASONS
        details[MOST_REASONS:] = [f"and {more} more reasons; each run's own is below."]
    kinds = [f"{sum(run.status == s for run in runs)} {s}" for s in ("failed", "broken")]
    text = f"{_count(runs)} left out of the tables ({', '.join(k for k in kinds if k[0] != '0')})."
    return [Caution("serious", text, tuple(details))]


def section_warnings(section: Section) -> list[Caution]:
    """What limits the numbers of one section."""
    before = (_few_seeds(section), _uneven_seeds(section))
    after = (_memory_not_full(section), _untreated(section), *_paper_notes(section))
    wrong = (_seeds_twice(section), several_codes(run.environment for run in section.runs))
    return [
        *(Caution("serious", text) for text in wrong if text),
        *(Caution("note", text) for text in before if text),
        *_coarse_evaluation(section),
        *(Caution("note", text) for text in after if text),
    ]


def _seeds_twice(section: Section) -> str | None:
    """Runs of one seed that disagree; those that are the same are one run."""
    found = []
    for group in section.groups:
        results: dict[int, set[Any]] = {}
        for run in group.complete:
            if run.config is not None and run.result is not None:  # without its times
                measured = tuple(run.result.measures.items())
                results.setdefault(run.config.seed, set()).add(measured)
        found += [
            f"{group.label}, seed {seed}" for seed, all_of in results.items() if len(all_of) > 1
        ]
    if not found:
        return None
    return (
        f"Several runs of one seed disagree ({_some(found, 4)}). The tables count one of each, the "
        "last by the name of its folder: leave the others out."
    )


def _few_seeds(section: Section) -> str | None:
    done = {group.label: len(group.values("acc")) for group in section.groups}
    few = [f"{label}: {seeds}" for label, seeds in done.items() if 0 < seeds < FEW_SEEDS]
    if not few:
        return None
    return f"Few seeds ({_some(few, 8)}): standard errors and intervals are rough. Give at least 5."


def _uneven_seeds(section: Section) -> str | None:
    seeds = {frozenset(r.config.seed for r in g.complete if r.config) for g in section.groups}
    if len(seeds - {frozenset()}) < 2:
        return None
    return "The methods were not run with the same seeds; differences use the shared ones only."


def _coarse_evaluation(section: Section) -> list[Caution]:
    intervals = {r.config.eval_every for r in section.runs if r.config}
    coarse = max(intervals, default=1)
    if coarse == 1:
        return []
    length = max((_batches_per_task(r) for r in section.runs), default=0.0)
    much = 0 < COARSE_SHARE * length < coarse
    text = (
        f"Evaluated every {coarse} stream batches: WC-Acc is optimistic, the dip and the total "
        "variation are too small. The paper evaluates after every batch."
    )
    warnings = [Caution("serious" if much else "note", text)]
    if len(intervals) > 1:
        text = f"Evaluation intervals differ ({sorted(intervals)}): WC-Acc and variation of these "
        warnings.append(Caution("serious", text + "runs cannot be compared."))
    return warnings


def _batches_per_task(run: StoredRun) -> float:
    if run.recorded is None:
        return 0.0
    path = run.recorded.accuracy
    return float((path.positions[-1] + 1) / (path.tasks[-1] + 1))


def _memory_not_full(section: Section) -> str | None:
    for run in section.runs:
        if run.status != "complete" or run.recorded is None or run.config is None:
            continue
        arrived = int(run.recorded.accuracy.positions[-1] + 1) * run.config.batch_size
        if run.config.capacity is not None and arrived < run.config.capacity:
            return (
                f"The memory of {run.config.capacity:,} never filled: about {arrived:,} examples "
                "arrived. This is replay of everything."
            )
    return None


def _untreated(section: Section) -> str | None:
    left = {name: why for run in section.runs for name, why in run.untreated.items()}
    names = [f"{name} ({why})" for name, why in left.items()]
    return f"LPR leaves some layers as they are: {_some(names, 6, '; ')}." if names else None


def _paper_notes(section: Section) -> list[str | None]:
    rows = [paper_row_of(section, group) for group in section.groups]
    return list(dict.fromkeys(row.note for row in rows if row))


def _line(problem: str | None) -> str:
    """One line of a problem; the last one of a traceback says what happened."""
    line = ((problem or "").strip().splitlines() or ["unknown"])[-1][:300]
    return line if line.endswith(".") else f"{line}."


def _count(runs: Sequence[StoredRun]) -> str:
    return "1 run is" if len(runs) == 1 else f"{len(runs)} runs are"


def _names(runs: Sequence[StoredRun]) -> str:
    return _some([run.folder.name for run in runs], 6)


def _some(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def headline(study: Study) -> str:
    """One line: what was run."""
    groups: list[Group] = [g for section in study.sections for g in section.groups]
    if not groups:
        return "No run has numbers yet."
    methods = list(dict.fromkeys(g.label for g in groups))
    where = ", ".join(dict.fromkeys(s.benchmark for s in study.sections))
    return f"{_some(methods, 4)} on {where}"
