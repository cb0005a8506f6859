"""Call specdec with OpenAI's client: a stream, a choice of the speculation mode, several outputs, an error.

Start a system with its gateway first: `specdec up --http 127.0.0.1:8000 --detach`. `OPENAI_BASE_URL` names another one.
Needs `pip install openai`.
"""

import os

from openai import BadRequestError, OpenAI

PROMPT = "def read_lines(path):"


def main() -> None:
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        print(f"model {model}")
        show_stream(client, model)
        show_speculation(client, model)
        show_outputs(client, model)
        show_error(client, model)


def show_stream(client: OpenAI, model: str) -> None:
    """Print an answer while it is generated. Chats are streamed in the same way by `client.chat.completions`."""
    for chunk in client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0, stream=True):
        print(chunk.choices[0].text, end="", flush=True)
    print()


def show_speculation(client: OpenAI, model: str) -> None:
    """Choose the mode and the draft length, and read how often the target accepted a draft token."""
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body={"speculation": {"mode": "rejection", "gamma": 3}, "return_metrics": True},
    )
    metrics = answer.model_dump()["metrics"]["speculative_decoding"]
    print(f"{metrics['num_accepted_draft_tokens']} of {metrics['num_draft_tokens']} draft tokens accepted")


def show_outputs(client: OpenAI, model: str) -> None:
    """Ask for two sampled outputs. With a seed, the same request gives the same two texts again."""
    answer = client.completions.create(model=model, prompt="def main():", max_tokens=8, n=2, seed=7)
    print([choice.text for choice in answer.choices])


def show_error(client: OpenAI, model: str) -> None:
    """Send a field that is refused. The client raises the class of the HTTP status."""
    try:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=-1)
    except BadRequestError as error:
        print(f"{error.status_code} {error.param}: {error.body['message']}")


if __name__ == "__main__":
    main()
