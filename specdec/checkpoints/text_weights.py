"""Tell by its name whether a stored tensor belongs to the text half of a model that also reads images or sound.

Checks before a load and sizes go by these names. The load itself asks transformers' own conversion of names
(`specdec.engine.model.text_half`), so a name that is taken for the wrong half makes a size wrong and no text.
"""

from __future__ import annotations

import re

#: Parts of a tensor's name that tell its half. The first part that does so decides.
_TEXT = re.compile(r"language_model|text_model|lm_head|llm")
_OTHER = re.compile(
    r"visual\w*|vision_\w*|image_\w*|video_\w*|audio_\w*|embed_(vision|audio|image)\w*|patch_\w*|\w*projector|connector|"
    r"aligner|merger|encoder|mlp1|mlp_AR|high_res_\w*|view_separator|vqmodel|generation_\w*|talker|token2wav|code2wav"
)


def is_text_weight(name: str) -> bool:
    """Return whether a stored tensor belongs to the text half."""
    for part in name.split("."):
        if _TEXT.fullmatch(part):
            return True
        if _OTHER.fullmatch(part):
            return False
    return True
