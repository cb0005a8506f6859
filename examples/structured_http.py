"""Demand a form of the output over HTTP: with OpenAI's client, vLLM's fields and Anthropic's client.

Start a system with its gateway first: `specdec up --http 127.0.0.1:8000 --detach`. `OPENAI_BASE_URL` names another one.
Needs `pip install openai anthropic`.
"""

import os
from typing import Literal

from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
HELLO = [{"role": "user", "content": "import os"}]


class Ticket(BaseModel):
    """Bounds let the JSON end: this small model knows nothing of tickets."""

    title: str = Field(max_length=12)
    priority: int = Field(ge=0, le=9)
    kind: Literal["bug", "feature"]


class Verdict(BaseModel):
    """Without bounds, which Anthropic's client leaves out of the schema that it sends."""

    answer: Literal["yes", "no"]
    is_sure: bool


def main() -> None:
    with OpenAI(base_url=BASE_URL, api_key="none") as client:
        show_chat(client)
        show_response(client)
        show_vllm(client)
        show_warnings(client)
        show_refusal(client)
    with Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="none") as claude:
        show_message(claude)


def show_chat(client: OpenAI) -> None:
    """Send a pydantic model as the strict `response_format`, and read an instance of it."""
    answer = client.chat.completions.parse(
        model="target", messages=HELLO, response_format=Ticket, temperature=0, max_tokens=200
    )
    print(repr(answer.choices[0].message.parsed))


def show_response(client: OpenAI) -> None:
    """Send it as the strict `text.format` of a response."""
    response = client.responses.parse(model="target", input="import os", text_format=Ticket, temperature=0)
    print(repr(response.output_parsed))


def show_vllm(client: OpenAI) -> None:
    """Send `structured_outputs`, or the older `guided_choice`, as to vLLM."""
    for fields in ({"structured_outputs": {"regex": "[a-f]{4}-[a-f]{2}"}}, {"guided_choice": ["yes", "no"]}):
        answer = client.completions.create(
            model="target", prompt="import os", temperature=0, max_tokens=40, extra_body=fields
        )
        print(answer.choices[0].text)


def show_warnings(client: OpenAI) -> None:
    """Send a schema that is not strict. The answer names the keywords that are not enforced."""
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3, "uniqueItems": True}
    answer = client.chat.completions.create(
        model="target",
        messages=HELLO,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "letters", "schema": schema}},
    )
    print(answer.choices[0].message.content, answer.model_extra["specdec"])


def show_refusal(client: OpenAI) -> None:
    """A strict schema is enforced as a whole, or refused before anything is generated."""
    schema = {"type": "array", "uniqueItems": True}
    try:
        client.chat.completions.create(
            model="target",
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        )
    except BadRequestError as error:
        print(f"{error.status_code} {error.code}: {error.body['message']}")


def show_message(claude: Anthropic) -> None:
    """Send a pydantic model as the `output_config.format` of a message."""
    message = claude.messages.parse(
        model="target", messages=HELLO, max_tokens=200, output_format=Verdict, extra_body={"temperature": 0}
    )
    print(repr(message.parsed_output))


if __name__ == "__main__":
    main()
