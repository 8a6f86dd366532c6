"""Runs can be told apart, and text read, by those who see fewer colours or less contrast."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from pfedgate.core.drawing import DASHES, THEMES, config
from pfedgate.report import html

Floats = npt.NDArray[np.float64]
# Machado, Oliveira and Fernandes (2009), severity 1: what is left of linear RGB.
SEEN = {
    "all": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
LMS = np.array(
    [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
)
LAB = np.array(
    [[0.21045426, 0.79361779, -0.00407205], [1.9779985, -2.42859221, 0.45059371], [0.02590404, 0.78277177, -0.80867577]]
)


def linear(colour: str) -> Floats:
    shares = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def oklab(light: Floats) -> Floats:
    return LAB @ np.cbrt(LMS @ np.clip(light, 0, 1))


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) + 0.05 for colour in (one, other))
    return high / low


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("sight", SEEN)
def test_colours_of_runs_differ(name: str, sight: str) -> None:
    seen = [oklab(SEEN[sight] @ linear(colour)) for colour in THEMES[name]["runs"]]
    closest = min(float(np.linalg.norm(one - other)) for one, other in itertools.combinations(seen, 2))
    assert closest > 0.075  # about the least of Okabe and Ito's colours


def test_forty_runs_look_different() -> None:
    colours = THEMES["light"]["runs"]
    looks = [(colours[at % len(colours)], tuple(DASHES[at % len(DASHES)])) for at in range(40)]
    assert len(set(looks)) == 40
    assert all(one != other for one, other in itertools.pairwise(pattern for _, pattern in looks))


def test_the_page_has_the_colours_of_the_charts() -> None:
    css = html._colours()
    for name, paint in THEMES.items():
        assert config(name)["range"]["category"] == paint["runs"]
        rule = css[css.index(f'[data-theme="{name}"]') :].split("}")[0]
        assert all(f"--c{at}:{colour};" in rule for at, colour in enumerate(paint["runs"]))


@pytest.mark.parametrize("name", THEMES)
def test_contrast(name: str) -> None:
    paint = THEMES[name]
    for text, ground in itertools.product(("ink", "soft", "faint"), ("card", "page", "shade")):
        assert contrast(paint[text], paint[ground]) >= 4.5, (text, ground)
    assert contrast(paint["good"], paint["good-back"]) >= 4.5
    for colour in paint["runs"]:
        assert contrast(colour, paint["card"]) >= 3, colour
