"""Draws what `ember.py` measured: AP over the CPU time of training, a curve for each contestant.

    python -m benchmarks which_model benchmarks/results/ember-cpu.json docs/images/which-model.png

The page is drawn by plotly and photographed by Chromium, which has to be installed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from plotly import graph_objects
from plotly.subplots import make_subplots

COLORS = ("#d1495b", "#00798c", "#edae49", "#30638e", "#6a994e", "#777777")
WIDTH, HEIGHT = 1200, 520


def main(results: Path, image: Path) -> None:
    rows = [row for row in json.loads(results.read_text(encoding="utf-8"))["rows"] if row["what"] == "training"]
    data = sorted({row["data"] for row in rows})
    contestants = sorted({row["contestant"] for row in rows})
    titles = [f"{name}: AP on test over CPU-seconds of training" for name in data]
    figure = make_subplots(rows=1, cols=len(data), subplot_titles=titles)
    named = set()
    for column, name in enumerate(data, start=1):
        for color, contestant in zip(COLORS, contestants, strict=False):
            mine = [row for row in rows if (row["data"], row["contestant"]) == (name, contestant)]
            if not mine:
                continue
            budgets = sorted({row["budget"] for row in mine})
            scores = [[row["AP"] for row in mine if row["budget"] == budget] for budget in budgets]
            means = [statistics.fmean(some) for some in scores]
            error = {"array": [max(some) - mean for some, mean in zip(scores, means, strict=True)],
                     "arrayminus": [mean - min(some) for some, mean in zip(scores, means, strict=True)]}  # fmt: skip
            curve = graph_objects.Scatter(
                x=budgets, y=means, error_y=error, name=contestant, line={"color": color}, mode="lines+markers",
                legendgroup=contestant, showlegend=contestant not in named,
            )  # fmt: skip
            named.add(contestant)
            figure.add_trace(curve, row=1, col=column)
    figure.update_layout(template="plotly_white", width=WIDTH, height=HEIGHT, legend={"orientation": "h"})
    figure.update_xaxes(range=[0, 1.1 * max(row["budget"] for row in rows)])
    figure.update_yaxes(range=[0, 1.1 * max(row["AP"] for row in rows)])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}",
                   "--virtual-time-budget=5000", f"--screenshot={image.resolve()}", page.as_uri()]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
