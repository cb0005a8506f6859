"""Tell by its name whether a stored tensor belongs to the text half of a model that also reads images or sound.

Checks before a load and sizes go by these names. The load itself asks transformers' own conversion of names, so a name
that is taken for the wrong half makes an estimate wrong and no text (`specdec.engine.model.text_half`).
"""

from __future__ import annotations

import re

#: Parts of a tensor's name that name its half. The first part that does so decides.
_TEXT = re.compile(r"language_model|text_model|lm_head|llm|thinker_text")
_OTHER = re.compile(
    r"visi\w*|visual\w*|\w*_visual|vit|image_\w*|video_\w*|audio\w*|speech\w*|acoustic\w*|semantic_tokenizer\w*|sam_\w*|"
    r"embed_(vision|audio|image)|(vision|audio|image|video)_\w*|\w*(multi_?modal|modality|mm)_projector|\w*projector|"
    r"mlp1|connector|aligner|generation_\w*|(q|w)former|\w*resampler|perceiver\w*|perception\w*|vq\w*|high_res\w*|"
    r"encoder|merger|talker|token2wav|code2wav|adaptor|img_\w*|row_embed|view_\w*"
)


def is_text_weight(name: str) -> bool:
    """Return whether a stored tensor belongs to the text half."""
    for part in name.split("."):
        if _TEXT.fullmatch(part):
            return True
        if _OTHER.fullmatch(part):
            return False
    return True
