"""Resume a stream in a new process, after the program that read it was killed.

The server keeps a session's tokens. A program that has stored the session's id and the number of tokens it received can
go on where it stopped: no token is lost or repeated. The SDK does the same by itself when a connection or a coordinator
is lost. This program starts itself as a reader, kills the reader in the middle of the stream, and reads the rest.

Start a system first: `specdec up --detach`. `SPECDEC_ENDPOINT` names another one.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec import Client
from specdec.client import GenerateOptions

PROMPT = "def read_lines(path):"
GREEDY: GenerateOptions = {"temperature": 0, "max_new_tokens": 64}
NUM_TOKENS_BEFORE_THE_CRASH = 20


def main() -> None:
    with TemporaryDirectory() as folder, Client() as client:
        notes = Path(folder) / "received.json"
        reader = subprocess.Popen([sys.executable, __file__, notes], stdout=subprocess.PIPE)
        reader.stdout.readline()  # until the reader has stored some tokens
        reader.kill()
        reader.wait()
        received = json.loads(notes.read_text())
        with client.resume(received["session_id"], received["num_tokens"]) as stream:
            rest = stream.result()
        text = received["text"] + rest.text
        print(text)
        print(f"-- {received['num_tokens']} tokens came before the crash, {len(rest.token_ids)} after it")

        whole = client.generate(PROMPT, **GREEDY)
        print(f"-- the same text as without a crash: {text == whole.text}")


def read(notes: Path) -> None:
    """Store what has arrived after each chunk, until this process is killed."""
    received: dict[str, Any] = {"session_id": "", "num_tokens": 0, "text": ""}
    with Client() as client, client.generate(PROMPT, stream=True, **GREEDY) as stream:
        for chunk in stream:
            received["session_id"] = stream.session_id
            received["num_tokens"] += len(chunk.token_ids)
            received["text"] += chunk.text
            unfinished = notes.with_suffix(".new")
            unfinished.write_text(json.dumps(received))
            unfinished.replace(notes)
            if received["num_tokens"] >= NUM_TOKENS_BEFORE_THE_CRASH:
                print("stored", flush=True)
                time.sleep(60)  # until the other process kills this one


if __name__ == "__main__":
    read(Path(sys.argv[1])) if sys.argv[1:] else main()
