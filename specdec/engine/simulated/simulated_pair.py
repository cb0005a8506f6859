"""The numbers that describe a simulated pair, and the model names that set them.

`simulated:70b-1b` is a preset; options follow after commas: `simulated:70b-1b,alpha=0.9/0.4/0.9,stretch=128,
odd_alpha=0.5,predraft=off,predict=0.8,fan_out=4,delay_ms=2.5,step_ms=1`. Called by the services' entry points and by
`bench`, which computes ideal times from these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specdec.contract.errors import InvalidRequest
from specdec.contract.types import SIMULATED_PREFIX
from specdec.engine.simulated.device import ModelledTime
from specdec.engine.simulated.text import TextOptions


@dataclass(frozen=True, slots=True)
class SimulatedPair:
    """Parameters of a simulated draft and target."""

    target: ModelledTime
    draft: ModelledTime
    text: TextOptions
    fan_out: int = 8
    """F: number of next tokens guessed for each accepted length."""
    predrafts: bool = True
    link_delay_s: float = 0.0
    """One-way delay between coordinator and this engine, added to that of the real network."""

    def draft_step_s(self) -> float:
        """Return t_d: the time of one draft token of one session."""
        return self.draft.step_s(1)

    def branched_step_s(self, gamma: int) -> float:
        """Return t_d': the time of one token of every branch of one session."""
        return self.draft.step_s(self.num_branches(gamma))

    def verify_s(self, gamma: int) -> float:
        """Return t_v: the time of the committed token and gamma draft tokens of one session."""
        return self.target.step_s(gamma + 1)

    def num_branches(self, gamma: int) -> int:
        return (gamma + 1) * self.fan_out


def _pair(t_ar_ms: float, t_v_ms: float, t_d_ms: float, alpha: float) -> SimulatedPair:
    """Return a pair from the target's times for one and for five tokens and the draft's time for one.

    A draft step over 40 branch tokens is assumed to take a fifth longer than over one token.
    """
    per_token_ms = (t_v_ms - t_ar_ms) / 4
    return SimulatedPair(
        target=ModelledTime((t_ar_ms - per_token_ms) / 1e3, per_token_ms / 1e3),
        draft=ModelledTime(0.995 * t_d_ms / 1e3, 0.005 * t_d_ms / 1e3),
        text=TextOptions(alphas=(alpha,)),
    )


PRESETS = {
    "70b-1b": _pair(18.5, 20.0, 2.5, 0.9),
    "32b-0.6b": _pair(10.3, 11.5, 2.5, 0.76),
    "8b-0.6b": _pair(5.5, 6.0, 1.5, 0.75),
}

_OPTIONS: dict[str, Callable[[SimulatedPair, str], SimulatedPair]] = {
    "alpha": lambda pair, value: replace(pair, text=replace(pair.text, alphas=tuple(map(float, value.split("/"))))),
    "odd_alpha": lambda pair, value: replace(
        pair, text=replace(pair.text, odd_alphas=tuple(map(float, value.split("/"))))
    ),
    "stretch": lambda pair, value: replace(pair, text=replace(pair.text, stretch_tokens=int(value))),
    "predict": lambda pair, value: replace(pair, text=replace(pair.text, predictability=float(value))),
    "fan_out": lambda pair, value: replace(pair, fan_out=int(value)),
    "predraft": lambda pair, value: replace(pair, predrafts={"on": True, "off": False}[value]),
    "delay_ms": lambda pair, value: replace(pair, link_delay_s=float(value) / 1e3),
    "step_ms": lambda pair, value: replace(pair, target=ModelledTime(float(value) / 1e3, 0.0)),
}


def simulated_pair(model: str) -> SimulatedPair:
    """Return the pair that a model name such as `simulated:70b-1b,predraft=off` describes.

    Raises:
        InvalidRequest: an unknown preset or option, or a value that the option does not accept.
    """
    preset, *options = model.removeprefix(SIMULATED_PREFIX).split(",")
    pair = PRESETS.get(preset)
    if pair is None:
        raise InvalidRequest(f"unknown simulated pair {preset!r}; choose one of {', '.join(PRESETS)}", field="model")
    for option in options:
        name, _, value = option.partition("=")
        try:
            pair = _OPTIONS[name](pair, value)
        except (KeyError, ValueError) as error:
            raise InvalidRequest(
                f"simulated pair: cannot read {option!r}: expected NAME=VALUE with one of {', '.join(_OPTIONS)}",
                field="model",
            ) from error
    text = pair.text
    if not (
        all(0.0 <= share <= 1.0 for share in (*text.alphas, *text.odd_alphas, text.predictability))
        and text.stretch_tokens >= 1
        and pair.fan_out >= 1
        and pair.link_delay_s >= 0.0
        and pair.target.fixed_s > 0.0
    ):
        raise InvalidRequest(f"simulated pair: a value in {model!r} is out of range", field="model")
    return pair
