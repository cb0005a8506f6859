"""Tells which fields of other servers' APIs would change the output, by their names.

Clients spell one field in several ways, such as `guided_json`, `guidedJson` and `guided-json`. Names are compared in
lower case and without dashes and underscores, so a kind of field is known by one word.
"""

from __future__ import annotations

import re
from typing import Any

#: Objects in which clients of other servers, or of other routes, put their fields.
CARRIERS = ("config", "extra_args", "extra_body", "generation_config", "inference_config", "model_kwargs", "nvext",
            "options", "output_config", "parameters", "sampling_params", "text", "vllm_xargs")  # fmt: skip

#: Fields that limit what a model may write, such as grammar, guided_json, json_schema and regex.
_CONSTRAINT = re.compile(
    r"guid(ed|ance)(?!scale).*|structur(ed|al).*|lark.*|cfg|enum(s|values)?|pattern"
    r"|.*(grammar|regex|regularexpression|bnf|llguidance|json(schema|object|mode|output|only|format)|logits?processor"
    r"|(vocab|token)mask).*|(forced?|strict)?json|.*schema"
    r"|((allowed|forced?))?choices?|constrain(ts?|ed.+)|(response|output)(format|model|pattern|(mime)?type)|format"
    r"|(allowed|banned|bad|forced?|(begin)?suppress)(words|tokens?|strings|bos|eos|decoder).*|prefixallowed.+"
)
#: Lengths, ends and draws of the output. Any value changes the text; a route's own spelling is no foreign field.
_REQUESTED = re.compile(
    r"(max|min)(new|gen|output|completion|generated)?(tokens|length|len)|(n|num)predict|stop(sequences|strings?|words?)?"
    r"|stoptokens?(ids?)?|ignoreeos|(random|sampling)?seed|temperature|topp|topk|minp"
    r"|(repetition|presence|frequency)penalty|logitbias"
)
#: Samplers of other servers that are off at 0, and those that are off at 1 as well.
_OFF_AT_0 = re.compile(
    r"topa|(top)?nsigma|(eta|epsilon)cutoff|penaltyalpha|(encoder)?norepeatngramsize|drymultiplier|xtcprobability"
    r"|mirostat(mode)?|(dynatemp|dynamictemperature)(range)?|smoothingfactor|diversitypenalty|watermark"
)
_OFF_AT_1 = re.compile(r"typical(p|mass)?|tfsz?|(repeat|encoderrepetition|length)penalty|(guidance|cfg)scale|numbeams")


def constrains_output(name: str) -> bool:
    """Return whether a field limits what the model may write."""
    return _CONSTRAINT.fullmatch(_bare(name)) is not None


def changes_text(name: str, value: Any) -> bool:
    """Return whether a field that is not null asks for another text than that of a request without it."""
    bare = _bare(name)
    if bare == "dosample":
        return value is False
    if _REQUESTED.fullmatch(bare):
        return bool(value != [])
    is_one = type(value) in (int, float) and value == 1
    return bool(value) and bool(_OFF_AT_0.fullmatch(bare) or (_OFF_AT_1.fullmatch(bare) and not is_one))


def is_carrier(name: str) -> bool:
    """Return whether a field is an object with fields of its own that count like those of the body."""
    return _bare(name) in _BARE_CARRIERS


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_BARE_CARRIERS = frozenset(map(_bare, CARRIERS))
