"""Every figure can be drawn, keeps its colours, and touches nothing global."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from proxreplay.errors import DataError
from proxreplay.report.grouping import Section, read_study
from proxreplay.report.plots import COLOURS, FIGURES, save
from tests.report.synthetic import write_run


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> Section:
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        write_run(folder / f"er{seed}", "er", seed, diagnostics=True)
        for every in (5, 10):
            settings = {"refresh.every": every, "refresh.samples": 10}
            name = f"lpr{every}-{seed}"
            write_run(folder / name, "lpr-er", seed, settings=settings, diagnostics=True)
    (found,) = read_study([folder]).sections
    return found


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_can_be_drawn(section: Section, name: str) -> None:
    picture = io.BytesIO()
    FIGURES[name](section).savefig(picture, format="png")
    assert len(picture.getvalue()) > 5000


def test_a_method_has_the_same_colour_in_every_figure(section: Section) -> None:
    def colours(name: str) -> dict[str, str]:
        return {
            str(line.get_label()): to_hex(str(line.get_color())).upper()
            for axes in FIGURES[name](section).axes
            for line in axes.get_lines()
            if not str(line.get_label()).startswith("_")
        }

    everywhere, ratios = colours("accuracy"), colours("figure-2")
    assert everywhere["ER"] == COLOURS[0].upper()
    assert "ER" not in ratios  # there is no ratio without a rule
    assert ratios.items() <= everywhere.items()


def test_figure_1_shows_drift_variation_and_accuracy_of_the_first_task(section: Section) -> None:
    figure = FIGURES["figure-1"](section)
    assert [axes.get_title() for axes in figure.axes] == [
        "Representation drift",
        "Variation, task 1",
        "Accuracy on task 1",
    ]
    assert all(axes.get_lines()[0].get_label() == "ER" for axes in figure.axes)


@pytest.mark.parametrize("methods", [2, 4, 5])
def test_every_map_at_the_bottom_of_its_column_has_an_axis(tmp_path: Path, methods: int) -> None:
    for method in ("er", "der", "ema", "lode", "er-ace")[:methods]:
        write_run(tmp_path / method, method)
    (found,) = read_study([tmp_path]).sections
    *maps, _ = FIGURES["tasks"](found).axes
    shown = [axes for axes in maps if axes.get_visible()]
    assert len(shown) == methods
    lowest: dict[float, float] = {}
    for axes in shown:
        x, y = axes.get_subplotspec().colspan.start, axes.get_subplotspec().rowspan.start  # type: ignore[union-attr]
        lowest[x] = max(lowest.get(x, 0), y)
    labelled = {
        (a.get_subplotspec().colspan.start, a.get_subplotspec().rowspan.start)  # type: ignore[union-attr]
        for a in shown
        if a.get_xlabel()
    }
    assert labelled == set(lowest.items())


def test_task_boundaries_are_thin_lines(section: Section) -> None:
    (axes,) = FIGURES["accuracy"](section).axes
    boundaries = [line for line in axes.get_lines() if len(set(line.get_xdata())) == 1]  # type: ignore[arg-type]
    assert [line.get_xdata()[0] for line in boundaries] == [1, 2, 3, 4]  # type: ignore[index]
    assert all(line.get_linewidth() < 1 for line in boundaries)


def test_what_was_not_recorded_is_not_drawn(tmp_path: Path) -> None:
    write_run(tmp_path)
    (plain,) = read_study([tmp_path]).sections
    with pytest.raises(DataError, match="representation drift"):
        FIGURES["drift"](plain)
    with pytest.raises(DataError, match=r"refresh\.every"):
        FIGURES["sensitivity"](plain)


def test_the_papers_sensitivity_is_drawn_hollow(tmp_path: Path) -> None:
    for every in (5, 10):
        settings = {"refresh.every": every, "refresh.samples": None, "capacity": 2000}
        write_run(tmp_path / str(every), "lpr-er", benchmark="split-cifar100", settings=settings)
    (cifar,) = read_study([tmp_path]).sections
    left = FIGURES["sensitivity"](cifar).axes[0]
    (theirs,) = [line for line in left.get_lines() if line.get_label() == "p = 1, paper"]
    assert list(theirs.get_ydata()) == [0.3294, 0.3334, 0.3332]  # type: ignore[arg-type]


def test_pictures_are_written(section: Section, tmp_path: Path) -> None:
    save(FIGURES["tasks"](section), tmp_path / "new" / "map.svg")
    assert (tmp_path / "new" / "map.svg").read_text().startswith("<?xml")


def test_importing_is_cheap_and_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    code = f"""
import sys
from pathlib import Path
import proxreplay.report.page
from proxreplay.report.grouping import read_study
from proxreplay.report.plots import over_time, save
assert "matplotlib" not in sys.modules and "jinja2" not in sys.modules
(section,) = read_study([Path({str(tmp_path)!r})]).sections
save(over_time(section, "accuracy"), Path({str(tmp_path / "a.png")!r}))
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
