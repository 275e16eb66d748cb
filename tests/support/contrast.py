"""Contrast of what a page shows, by the formula of WCAG 2.2, and colours as people with other eyes see them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from playwright.sync_api import Page

from support.browser import Colour

__all__ = ["ShownText", "alike", "contrast", "rgb", "shown_texts", "variables"]


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text as it stands on the page, its colours after blending, and its contrast."""

    text: str
    where: str
    colour: Colour
    ground: Colour
    contrast: float


_TEXTS = """() => {
  const parse = (c) => { const n = (c.match(/[\\d.]+/g) || []).map(Number); return n.length == 3 ? [...n, 1] : n; };
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3]));
  const ground = (el) => {
    const layers = [];
    for (let e = el; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
    return layers.reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const el = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !el.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (!el.getClientRects().length || el.closest("script, style")) continue;
    const style = getComputedStyle(el), behind = ground(el);
    const ink = parse(el instanceof SVGElement ? style.fill : style.color);
    let opacity = 1;
    for (let e = el; e; e = e.parentElement) opacity *= Number(getComputedStyle(e).opacity);
    found.push([text.slice(0, 60), el.tagName.toLowerCase() + "." + (el.getAttribute("class") || ""),
                over([...ink.slice(0, 3), ink[3] * opacity], behind).map(Math.round), behind.map(Math.round)]);
  }
  return found;
}"""


def contrast(a: Colour, b: Colour) -> float:
    """From 1 (the same) to 21 (black on white)."""
    lighter, darker = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def rgb(text: str) -> Colour:
    """`#rrggbb` or `#rgb`."""
    digits = text.strip().removeprefix("#")
    digits = "".join(d * 2 for d in digits) if len(digits) == 3 else digits
    r, g, b = bytes.fromhex(digits)
    return r, g, b


def shown_texts(page: Page) -> list[ShownText]:
    """Every text that is visible now, in HTML and in drawings of SVG. Grounds are those of background colours."""
    found: list[list[Any]] = page.evaluate(_TEXTS)
    return [ShownText(t, w, tuple(c), tuple(g), contrast(tuple(c), tuple(g))) for t, w, c, g in found]


def variables(page: Page, *names: str) -> dict[str, Colour]:
    """Custom properties `--NAME` of the page as they are in its present theme."""
    script = "names => names.map(n => getComputedStyle(document.documentElement).getPropertyValue('--' + n))"
    values: list[str] = page.evaluate(script, names)
    return {name: rgb(value) for name, value in zip(names, values, strict=True)}


# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as a protanope, deuteranope and tritanope sees it.
_EYES = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def alike(colours: dict[str, Colour], least: float) -> list[str]:
    """Pairs that lie nearer than `least` (CIE76 distance in Lab; 2 is just seen side by side) to some kind of eye."""
    found = []
    for eye, matrix in _EYES.items():
        lab = {name: _lab(np.clip(matrix @ _linear(c), 0, 1)) for name, c in colours.items()}
        for a, b in combinations(sorted(lab), 2):
            distance = float(np.linalg.norm(lab[a] - lab[b]))
            if distance < least:
                found.append(f"{a} and {b} are {distance:.1f} apart ({eye})")
    return found


def _linear(colour: Colour) -> np.ndarray:
    c = np.array(colour) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _luminance(colour: Colour) -> float:
    return float(_linear(colour) @ (0.2126, 0.7152, 0.0722))


def _lab(linear: np.ndarray) -> np.ndarray:
    """Linear sRGB to Lab, white D65."""
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    t = to_xyz @ linear / (0.95047, 1.0, 1.08883)
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
