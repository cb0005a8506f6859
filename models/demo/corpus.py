"""The text that the demo pair learns: the running interpreter's own standard library, as documents.

The corpus is a deterministic walk over the library's source with a held-out set chosen by a hash of the file's name.
The rest becomes two kinds of documents: stretches of a file, and conversations whose question is a function's docstring
and whose answer is that function. The prose corpus holds docstrings and the reference manual of the interpreter.
`train.py` uses both. Run alone, this module writes the prompts of the benchmarks (`python models/demo/corpus.py
bench/prompts`), all from held-out files.
"""

import ast
import hashlib
import inspect
import pydoc_data.topics
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"

EXCLUDED_DIRECTORIES = frozenset(
    # Tests, vendored wheels, code tables and generated text: they are long and teach nothing about code.
    {"site-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3", "turtledemo", "ensurepip"}
)
HELD_OUT_ONE_IN = 16
NEW_DOCUMENT_PROBABILITY = 0.15
"""Chance that a document ends at a top-level statement: short documents teach how text begins and ends."""

NUM_PROMPTS = 20
PROMPT_CHARACTERS = 480


@dataclass(frozen=True)
class SourceFile:
    """One file of the library: its path relative to the library's root, with `/`, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Return whether this file is held out of training."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def standard_library_files(root: Path | None = None) -> list[SourceFile]:
    """Every file of the library that is used, sorted by name.

    Args:
        root: the library's folder; default: the running interpreter's.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        # Both describe this machine's build, so the corpus would differ between machines.
        built_here = relative.parts[0].startswith(("config-", "_sysconfigdata"))
        if EXCLUDED_DIRECTORIES.isdisjoint(relative.parts[:-1]) and not built_here:
            files.append(SourceFile(relative.as_posix(), path.read_text("utf-8", errors="replace")))
    return files


def fingerprint(files: list[SourceFile]) -> str:
    """A short hash of names and texts, so that two trainings can tell whether they read the same library."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.text.encode() + b"\0")
    return digest.hexdigest()


def stretches(file: SourceFile, dice: random.Random) -> Iterator[str]:
    """Cut one file at some of its top-level statements, in order; nothing is lost and nothing repeats."""
    lines = file.text.splitlines(keepends=True)
    start = 0
    for statement in _parse(file).body:
        # A decorator or a comment block belongs to what follows it.
        line = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]) - 1
        while line > start and lines[line - 1].startswith("#"):
            line -= 1
        if line > start and dice.random() < NEW_DOCUMENT_PROBABILITY:
            yield "".join(lines[start:line])
            start = line
    yield "".join(lines[start:])


def conversations(file: SourceFile, dice: random.Random) -> Iterator[str]:
    """Conversations of one to three turns: the docstring asks, the function without its docstring answers."""
    turns = [USER + question + ASSISTANT + answer + EOS for question, answer in _documented_functions(file)]
    start = 0
    while start < len(turns):
        count = dice.randint(1, 3)
        system = f"{SYSTEM}Python, module {file.name.removesuffix('.py')}." if dice.random() < 0.2 else ""
        yield system + "".join(turns[start : start + count]).removesuffix(EOS)
        start += count


def documents(files: list[SourceFile], seed: int) -> list[str]:
    """All documents of these files in a shuffled order that `seed` fixes, without the outer BOS and EOS."""
    dice = random.Random(seed)
    texts = [text for file in files for text in (*stretches(file, dice), *conversations(file, dice)) if text.strip()]
    dice.shuffle(texts)
    return texts


def prose(files: list[SourceFile], *, held_out: bool) -> list[str]:
    """Documents of prose: the docstrings of each of these files, one after the other, and topics of the manual.

    Args:
        files: of the library.
        held_out: the files and topics that training never sees, or those it does.
    """
    topics = [SourceFile(name, text.strip()) for name, text in sorted(pydoc_data.topics.topics.items())]
    texts = ["\n\n".join(_docstrings(file)) for file in files if file.held_out == held_out]
    texts += [topic.text for topic in topics if topic.held_out == held_out]
    return [text for text in texts if text]


def prose_prompts(files: list[SourceFile]) -> list[str]:
    """Return beginnings of held-out prose, as long as the other prompts; up to 20."""
    texts = [text[:PROMPT_CHARACTERS].rstrip() for text in prose(files, held_out=True)]
    return [text for text in texts if len(text) > PROMPT_CHARACTERS // 2][:NUM_PROMPTS]


def prompts(files: list[SourceFile]) -> list[str]:
    """The benchmarks' prompts: the start of a function and what stands before it, from 20 held-out files."""
    texts = []
    for file in files:
        if file.held_out and (text := _prompt(file)):
            texts.append(text)
    return texts[:NUM_PROMPTS]


def _prompt(file: SourceFile) -> str | None:
    lines = file.text.splitlines(keepends=True)
    for statement in _parse(file).body:
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef) or statement.end_lineno is None:
            continue
        text = "".join(lines[: statement.lineno + 2])
        rest = statement.end_lineno - statement.lineno
        if len(text) >= PROMPT_CHARACTERS and rest > 8:
            cut = text[-PROMPT_CHARACTERS:]
            # A newline and the indentation after it are one token: a text cut between them would be unlike any learned.
            return cut[cut.index("\n") + 1 :].rstrip()
    return None


def _documented_functions(file: SourceFile) -> Iterator[tuple[str, str]]:
    lines = file.text.splitlines(keepends=True)
    for node in ast.walk(_parse(file)):
        if not isinstance(node, ast.FunctionDef) or (docstring := ast.get_docstring(node)) is None:
            continue
        if len(node.body) < 2 or node.end_lineno is None or node.end_lineno - node.lineno > 60:
            continue
        head, body = lines[node.lineno - 1 : node.body[0].lineno - 1], lines[node.body[0].end_lineno : node.end_lineno]
        indent = len(head[0]) - len(head[0].lstrip()) if head else 0
        if head:
            question = " ".join(docstring.split("\n\n")[0].split())
            yield question, "".join(line[indent:] if line.strip() else "\n" for line in head + body)


def _docstrings(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if len(text.split()) > 3:  # one or two words are too short for prose
                yield text


def _parse(file: SourceFile) -> ast.Module:
    try:
        return ast.parse(file.text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def main(directory: str) -> None:
    """Write the prompts as `00.txt` and so on into `directory`."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    for index, text in enumerate(prompts(standard_library_files())):
        (target / f"{index:02d}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
