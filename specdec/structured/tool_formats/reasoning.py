"""The marks of reasoning: two tags, or a channel."""

from specdec.contract.output_form import ReasoningFormat

REASONING_FORMATS = (
    ReasoningFormat(
        name="think",
        opener="<think>",
        closer="</think>",
        after_opener="\n",
        before_closer="\n",
        after_closer="\n\n",
    ),
    ReasoningFormat(name="mistral_think", opener="[THINK]", closer="[/THINK]"),
    ReasoningFormat(
        name="gemma4_channel", opener="<|channel>", closer="<channel|>", after_opener="thought\n", before_closer="\n"
    ),
)
