"""Generate text with the Python SDK: a whole answer, a stream with the source of each token, a second turn, an error.

Start a system first: `specdec up --detach`. `SPECDEC_ENDPOINT` names another one.
"""

from specdec import Client
from specdec.client import GenerateOptions, InvalidRequest

PROMPT = "def read_lines(path):"


def main() -> None:
    with Client() as client:
        show_answer(client)
        show_stream(client)
        show_second_turn(client)
        show_error(client)


def show_answer(client: Client) -> None:
    """Wait for a whole answer."""
    answer = client.generate(PROMPT, temperature=0, max_new_tokens=24)
    print(PROMPT + answer.text)
    print(f"-- {answer.usage.num_output_tokens} tokens, finish reason {answer.finish_reason}\n")


def show_stream(client: Client) -> None:
    """Read an answer while it is generated. Tokens that a draft proposed and the target accepted are in brackets."""
    options: GenerateOptions = {"temperature": 0, "max_new_tokens": 24, "gamma": 4, "provenance": True}
    with client.generate("import os", stream=True, **options) as stream:
        for chunk in stream:
            for token in chunk.details:
                was_drafted = token.source is not None and token.source.name == "ACCEPTED"
                print(f"[{token.text}]" if was_drafted else token.text, end="", flush=True)
    stats = stream.result().stats
    print(f"\n-- {stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted\n")


def show_second_turn(client: Client) -> None:
    """Continue a session, whose KV the server keeps."""
    first = client.generate("import json\n", temperature=0, max_new_tokens=8)
    second = client.generate("def main():", session_id=first.session_id, temperature=0, max_new_tokens=8)
    print(repr(first.text + second.text))
    usage = second.usage
    print(f"-- {usage.num_cached_prompt_tokens} of {usage.num_prompt_tokens} prompt tokens were in the KV\n")
    client.delete_session(first.session_id)


def show_error(client: Client) -> None:
    """Send a value that the server refuses. Each error has a class, a reason and the name of the field."""
    try:
        client.generate(PROMPT, temperature=-1)
    except InvalidRequest as error:
        print(f"-- {error.reason}, {error.field}: {error}")


if __name__ == "__main__":
    main()
