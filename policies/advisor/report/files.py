"""The files of a recommendation, as `Recommendation.write` writes them."""

from __future__ import annotations

import json

from ..advice.recommendation import FILES, Recommendation
from .page import render_html
from .render import render_text


def render_files(recommendation: Recommendation, where: str) -> dict[str, str]:
    """Make the text of each file, by name. `where`: the place where they are to be, for the command that they show."""
    texts = (
        json.dumps(recommendation.to_json(), indent=2) + "\n",
        recommendation.stores_yaml(),
        render_text(recommendation, out=where),
        render_html(recommendation, out=where),
    )
    return dict(zip(FILES, texts, strict=True))
