"""Draft with a program of your own: here, what followed the same tokens in earlier answers.

A draft replica can stand in front of any HTTP server that completes token ids as OpenAI's API does: a list of models
and completions. Whatever it proposes, the output stays the target's. This program serves such a source, starts a system
that drafts with it, and asks one question twice; the source learns the answer in between.
"""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tokenizers import Tokenizer

from specdec import Client

MODEL = Path(__file__).parents[1] / "models" / "demo" / "draft"  # the folder of the target's tokenizer
PROMPT = "def read_lines(path):"
CONTEXT_TOKENS = 3

tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
known = tokenizer.encode("\n").ids
places: dict[tuple[int, ...], int] = {}


def learn(token_ids: tuple[int, ...]) -> None:
    """Remember a text by each run of `CONTEXT_TOKENS` tokens in it."""
    start = len(known)
    known.extend(token_ids)
    for at in range(start + CONTEXT_TOKENS, len(known)):
        places[tuple(known[at - CONTEXT_TOKENS : at])] = at


def propose(prompt: list[int], max_tokens: int) -> list[int]:
    """Return what followed the prompt's last tokens in a known text; a line end if they never occurred."""
    at = places.get(tuple(prompt[-CONTEXT_TOKENS:]), 0)
    return known[at : at + max_tokens] if at else known[:1]


class Drafts(BaseHTTPRequestHandler):
    """The routes that a draft replica calls."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "answers", "max_model_len": 2048}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        drafts = [propose(prompt, asked["max_tokens"]) for prompt in asked["prompt"]]
        choices = [{"index": n, "token_ids": ids, "text": tokenizer.decode(ids)} for n, ids in enumerate(drafts)]
        self.answer({"choices": choices})

    def answer(self, body: dict[str, object]) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None:
        """Write no line a request."""


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Drafts)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    flags = ["--draft", str(MODEL), "--set", "draft.backend=server", "--set", f"draft.backend_url={url}"]
    up = [sys.executable, "-m", "specdec.cli", "up", *flags, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as system:
        try:
            with Client(system.stdout.readline().split("grpc=")[1].strip()) as client:
                for _ in range(2):
                    ask(client)
        finally:
            system.terminate()


def ask(client: Client) -> None:
    """Generate a text, print how many of the proposals were accepted, and let the source learn the text."""
    answer = client.generate(PROMPT, temperature=0, max_new_tokens=48, gamma=4)
    stats = answer.stats
    print(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted, {stats.num_rounds} rounds")
    learn(client.tokenize(PROMPT) + answer.token_ids)


if __name__ == "__main__":
    main()
