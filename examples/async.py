"""Run several requests at once with the asynchronous SDK, and stop one of them when it has run long enough.

Start a system first: `specdec up --detach`. `SPECDEC_ENDPOINT` names another one.
"""

import asyncio

from specdec import AsyncClient
from specdec.client import Completion, DeadlineExceeded

PROMPTS = ("import os", "def main():", "class Reader:")


async def main() -> None:
    async with AsyncClient() as client:
        answers = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt!r} -> {answer.text!r}")
        await show_closed_stream(client)
        await show_timeout(client)


async def complete(client: AsyncClient, prompt: str) -> Completion:
    """Return one greedy answer, and delete its session."""
    answer = await client.generate(prompt, temperature=0, max_new_tokens=12)
    await client.delete_session(answer.session_id)
    return answer


async def show_closed_stream(client: AsyncClient) -> None:
    """Close a stream after its first line. The server stops, and the client keeps what it received."""
    async with client.generate("def main():", stream=True, temperature=0, max_new_tokens=256) as stream:
        text = ""
        async for chunk in stream:
            text += chunk.text
            if "\n" in text.strip("\n"):
                break
    answer = await stream.result()
    print(f"closed after a line: finish reason {answer.finish_reason}, kept all text: {answer.text == text}")


async def show_timeout(client: AsyncClient) -> None:
    """Bound the time of a whole call. The error has the output so far."""
    try:
        await client.generate("def main():", max_new_tokens=256, ignore_eos=True, timeout=0.001)
    except DeadlineExceeded as error:
        print(f"{error.reason} after a millisecond")


if __name__ == "__main__":
    asyncio.run(main())
